"""Quantise weights with the tools of a runtime: NNCF for OpenVINO, torchao for ExecuTorch.

.. code-block:: text

    OpenVINO      file in float ──> nncf.compress_weights ──> file      int4 in blocks, embeddings and the last
                                                                        projection in int8; activations stay in float
    ExecuTorch    module ──> torchao.quantize_ ──> trace ──> file       XNNPACK: activations are rounded to 8 bits
                                                                        token by token; embeddings stay in float
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import logging
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import FlattenError, InvalidArgumentError
from ...errors.failures import raised_as
from ...errors.messages import first_line
from ...runners.openvino_runner import import_openvino, read_model
from ..example.example import Example
from ..program.flat_program import quietly
from ..proof.report import ExportReport
from .options import Quantization


def blocks_of(quantization: Quantization) -> int:
    """Return how many weights share a scale: 0 for all of an output, which is how both tools store 8 bits."""
    return quantization.block_size if quantization.bits == 4 or quantization.weights == "keep" else 0


def compress_openvino(path: pathlib.Path, quantization: Quantization, report: ExportReport) -> None:
    """Store the weights of a model of OpenVINO in fewer bits, instead of the model."""
    four = quantization.bits == 4

    def refused(error: BaseException) -> FlattenError:
        return FlattenError(
            f"NNCF cannot compress {path.name} ({type(error).__name__}: {first_line(error)}). Take another block "
            'size or 8 bits:\n    quantize="int8"'
        )

    with _nncf() as nncf:
        mode = nncf.CompressWeightsMode.INT4_ASYM if four else nncf.CompressWeightsMode.INT8_ASYM
        blocks = {"group_size": quantization.block_size} if four else {}
        with raised_as(refused):  # NNCF has errors of several kinds, without a common class
            made = [nncf.compress_weights(read_model(path), mode=mode, **blocks)]
    replace_openvino(path, made)
    others = ", those of embeddings and of the last projection in int8" if four else ", embeddings among them"
    report.remark(f"NNCF stored the weights in {quantization.weights}{others}.")


def replace_openvino(path: pathlib.Path, made: list[Any]) -> None:
    """Write a model, taken out of its list, instead of the one whose file its constants are read from."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compressed-") as folder:
        import_openvino().save_model(made[0], str(pathlib.Path(folder) / path.name), compress_to_fp16=False)
        made.clear()
        for file in sorted(pathlib.Path(folder).iterdir()):
            file.replace(path.parent / file.name)


@contextlib.contextmanager
def _nncf() -> Iterator[Any]:
    """NNCF without its reports of use, its lines and its bars on the terminal, and its class of loggers."""
    sender, made_loggers = "openvino_telemetry", logging.getLoggerClass()
    if "nncf" not in sys.modules and sender not in sys.modules:
        sys.modules[sender] = None  # type: ignore[assignment] # as if it were not installed
        try:
            nncf = importlib.import_module("nncf")
        finally:
            del sys.modules[sender]
    else:
        nncf = importlib.import_module("nncf")
    console: Any = importlib.import_module("rich").get_console()
    before, console.quiet = console.quiet, True
    try:
        with quietly("nncf"):
            yield nncf
    finally:
        console.quiet = before
        logging.setLoggerClass(made_loggers)  # parts of NNCF are imported by the call


def quantized_example(example: Example, quantization: Quantization, report: ExportReport) -> Example:
    """Return an example whose module has quantized projections, as the recipes of XNNPACK quantize them."""
    # example: the example; its module stays as it is
    block = blocks_of(quantization)
    module = copy.deepcopy(example.module)

    def fits(part: torch.nn.Module, name: str = "") -> bool:
        return isinstance(part, torch.nn.Linear) and (not block or part.in_features % block == 0)

    linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    count = sum(map(fits, linears))
    if not count:
        raise InvalidArgumentError(
            f"quantize={quantization.weights!r}: {type(module).__qualname__} has no torch.nn.Linear of whole blocks of "
            f'{block or 1} inputs. Leave quantize out, or take 8 bits:\n    quantize="int8"'
        )
    granularity: Any = importlib.import_module("torchao.quantization.granularity")
    api: Any = importlib.import_module("torchao.quantization.quant_api")
    config = api.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, quantization.weights),
        weight_granularity=granularity.PerGroup(block) if block else granularity.PerAxis(0),
    )

    def refused(error: BaseException) -> FlattenError:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return FlattenError(f"torchao cannot quantize {type(module).__qualname__} ({reason}).")

    with raised_as(refused):  # torchao has no class for its errors
        api.quantize_(module, config, filter_fn=fits)
    report.remark(
        f"torchao stored the weights of {count} of {len(linears)} projections in {quantization.weights}; activations "
        "are rounded to 8 bits, embeddings stay as they are."
    )
    return dataclasses.replace(example, module=module)
