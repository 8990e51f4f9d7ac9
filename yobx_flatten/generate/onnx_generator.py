"""Generate with ONNX files, in onnxruntime."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram

from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..export.exported_model import ExportedModel
from ..runners.folder_adapters import FolderAdapters
from ..runners.onnx_session import Providers, mapped_options, only_for_onnxruntime, require_onnxruntime
from ..runners.open import RUNTIMES, check_runtime, open_runner
from ..runners.program_runner import ProgramRunner, open_program
from .generator import Generator
from .layout import find_parts, folder_of
from .settings import GenerationSettings, read_settings
from .steps import Parts


class OnnxGenerator(Generator):
    """Generates tokens with ONNX files in onnxruntime.

    The cache stays in onnxruntime's memory: the outputs ``present.*`` are passed to the next call as
    ``past_key_values.*`` without a copy.

    Args:
        model: a folder as :func:`export_folder` writes it, or the file of a decoder whose inputs and outputs have the
            names that :func:`export_onnx` gives them.
        prefill: the file for the first call, which takes no cache; needed for a single file that does not accept an
            empty cache.
        settings: special tokens; by default read from ``config.json`` and ``generation_config.json`` next to the file.
        threads: number of threads that one operator can use; ``None`` for onnxruntime's own choice.
        pack: whether onnxruntime copies the weights into the order in which its kernels read them, ``True`` by default.
            With ``False``, a token takes longer, and the weights stay in the file, mapped into memory.
        device: where onnxruntime computes: ``"cpu"``, the default, ``"cuda"``, ``"cuda:1"``, ``"directml"``,
            ``"coreml"``, ``"webgpu"``, ``"openvino"``, ``"xnnpack"`` and others, see :data:`.devices.DEVICES`.
        providers: execution providers as onnxruntime takes them, instead of ``device``.

    Raises:
        GenerationError: when a file is missing, cannot be loaded, or is not made for generation.
        MissingDependencyError: when onnxruntime is not installed, or has no provider for the device.

    >>> import tempfile
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama")
    ...     found = OnnxGenerator(f"{folder}/llama").generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        prefill: str | os.PathLike[str] | None = None,
        settings: GenerationSettings | None = None,
        threads: int | None = None,
        pack: bool = True,
        device: str | None = None,
        providers: Providers | None = None,
    ) -> None:
        found = find_parts(pathlib.Path(model), ".onnx", prefill)
        require_onnxruntime("OnnxGenerator")
        how: dict[str, Any] = {"threads": threads, "device": device, "providers": providers}
        super().__init__(*_opened(found, "onnxruntime", "OnnxGenerator", settings, pack=pack, **how))


class ProgramGenerator(Generator):
    """Generates tokens with programs of ``torch.export``.

    Args:
        model: what :func:`export_program` returned for a decoder, a ``torch.export.ExportedProgram``, the file that
            ``save`` wrote, or a folder as :func:`export_folder` writes it.
        prefill: a program or file for the first call, which takes no cache; needed if ``model`` does not accept an
            empty cache.
        trust: whether you know who wrote the files, see :func:`.program_runner.open_program`; ``False`` by default.
        settings: special tokens; by default read from ``config.json`` and ``generation_config.json`` next to the file.

    Raises:
        GenerationError: when a file is missing, cannot be loaded, or is not made for generation.
        InvalidArgumentError: when ``model`` has another type.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import DecodeSizes, GenerationSettings, decode_inputs, export_program
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> found = ProgramGenerator(exported, settings=GenerationSettings()).generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """

    def __init__(
        self,
        model: ExportedModel | ExportedProgram | str | os.PathLike[str],
        *,
        prefill: ExportedModel | ExportedProgram | str | os.PathLike[str] | None = None,
        settings: GenerationSettings | None = None,
        trust: bool = False,
    ) -> None:
        given = {"decoder": model, **({} if prefill is None else {"prefill": prefill})}
        adapters = None
        if isinstance(model, (str, os.PathLike)):
            found: dict[str, Any] = {**find_parts(pathlib.Path(model), ".pt2", None)}
            folder = folder_of(found["decoder"])
            settings, adapters = settings or read_settings(folder), FolderAdapters(folder)
            given = {**found, **{part: value for part, value in given.items() if part != "decoder"}}
        runners: dict[str, Any] = {part: _runner(value, part, trust) for part, value in given.items()}
        super().__init__(Parts(**runners), settings or GenerationSettings(), adapters=adapters)


def _runner(value: Any, part: str, trust: bool) -> ProgramRunner:
    if isinstance(value, (str, os.PathLike)):
        return ProgramRunner(open_program(value, trust=trust), pathlib.Path(value).name)
    program = value.program if isinstance(value, ExportedModel) else value
    if not isinstance(program, ExportedProgram):
        raise InvalidArgumentError(
            f"ProgramGenerator takes an ExportedModel, an ExportedProgram or a path, found {describe_class(value)}."
        )
    return ProgramRunner(program, f"the {part}")


def generator_for(
    model: str | os.PathLike[str],
    runtime: str,
    *,
    threads: int | None = None,
    pack: bool = True,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Generator:
    """Open exported files for generation, with the generator class of ``runtime``."""
    # see `OnnxGenerator` for the options; OpenVINO and ExecuTorch accept only the number of threads
    if runtime == "onnxruntime":
        return OnnxGenerator(model, threads=threads, pack=pack, device=device, providers=providers)
    only_for_onnxruntime(runtime, device, providers)
    if runtime == "torch":
        return ProgramGenerator(model, trust=trust)
    check_runtime(runtime)
    found = _find(pathlib.Path(model), runtime)
    return Generator(*_opened(found, runtime, "open_generator", None, trust=trust, threads=threads))


def _opened(
    found: Mapping[str, pathlib.Path],
    runtime: str,
    caller: str,
    settings: GenerationSettings | None,
    *,
    pack: bool = True,
    **how: Any,
) -> tuple[Parts, GenerationSettings, FolderAdapters]:
    """Open the files of a model in a runtime, and the settings and adapters of their folder."""
    # how: other arguments of `open_runner`
    parts: dict[str, Any] = {}
    for part, file in found.items():
        options = None if pack else mapped_options(file, threads=how["threads"])
        parts[part] = open_runner(file, runtime=runtime, caller=caller, options=options, **how)
    folder = folder_of(found["decoder"])
    return Parts(**parts), settings or read_settings(folder), FolderAdapters(folder)


def _find(path: pathlib.Path, runtime: str) -> dict[str, pathlib.Path]:
    """Return the files in the runtime's own format, else files in another format that the runtime also reads."""
    own, *others = RUNTIMES[runtime]
    try:
        return find_parts(path, own, None)
    except GenerationError:
        if not others:
            raise
        return find_parts(path, others[0], None)
