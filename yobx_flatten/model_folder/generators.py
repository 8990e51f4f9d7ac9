"""Open an exported folder for generation, with the runtime that its manifest names, or another one."""

from __future__ import annotations

import os
import pathlib

from ..errors import GenerationError
from ..generate.generator import Generator
from ..generate.layout import MANIFEST
from ..generate.onnx_generator import generator_for
from ..runners.onnx_session import Providers
from ..runners.open import check_runtime
from .manifest import check_digests, check_folder, read_manifest
from .pieces.tasks import GENERATES, SPEAKS


def open_generator(
    folder: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    threads: int | None = None,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Generator:
    """Open an exported folder to generate text or speech, in the runtime that it was exported for.

    Args:
        folder: a folder as :func:`export_folder` writes it, or with files of the same names.
        runtime: ``"onnxruntime"``, ``"torch"``, ``"aotinductor"``, ``"executorch"`` or ``"openvino"``, which also takes
            ONNX files; ``None``, the default, for the runtime that the folder names.
        threads: number of threads that one operator can use in onnxruntime and OpenVINO, and that all files of the
            process share in ExecuTorch; ``None`` for the runtime's own choice. For torch: ``torch.set_num_threads``.
        trust: whether the caller trusts the author of the folder; ``False`` by default. AOTInductor packages and
            ``torch.export`` programs (``.pt2``) can run code when they are loaded, and are refused without trust.
            ONNX, OpenVINO and ExecuTorch files need no trust.
        device: where onnxruntime computes, ``"cuda"`` or ``"openvino"`` for example; the CPU by default. See
            :class:`.OnnxGenerator`.
        providers: execution providers as onnxruntime takes them, instead of ``device``.

    Returns:
        A generator: its ``generate`` returns the tokens of ``model.generate``.

    Raises:
        InvalidArgumentError: when there is no such runtime.
        GenerationError: when the folder does not exist, is for a task that generates nothing, has no files for the
            runtime, or files of ExecuTorch are open in another number of threads.
        MissingDependencyError: when the runtime is not installed.
        DamagedFileError: when a file changed after the export.
        UntrustedFileError: when a file runs code on loading, and ``trust`` is ``False``.

    >>> import tempfile
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama", to="program")
    ...     found = open_generator(f"{folder}/llama", trust=True).generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """
    check_runtime(runtime)
    path = check_folder(folder, GenerationError)
    chosen = runtime_of_folder(path) if runtime is None else runtime
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        if manifest.task not in (*GENERATES, *SPEAKS):
            raise GenerationError(
                f"{path} is for {manifest.task}: it does not generate. Call it:\n"
                f"    open_model({os.fspath(folder)!r})(...)"
            )
        check_digests(path, manifest.sha256)
    return generator_for(path, chosen, threads=threads, trust=trust, device=device, providers=providers)


def runtime_of_folder(path: pathlib.Path) -> str:
    """Return the runtime that a folder's manifest names; without a manifest, the runtime of its files."""
    if (path / MANIFEST).is_file():
        return read_manifest(path).runtime
    return "torch" if any(path.glob("*.pt2")) else "onnxruntime"
