"""Export a model to a folder of files that is proven before it appears.

.. code-block:: text

    model ──> pieces ──> export_onnx ──> cases ──> companions ──> generate like the model? ──> rename
              modules    replayed        stored    tokenizer
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import FolderExistsError, InvalidArgumentError, ReplayError
from ..errors.dependencies import is_installed
from ..errors.log import STEP
from ..export.free_space import check_room
from ..export.onnx.file import check_opset
from ..export.onnx.kernels import has_kernels
from ..export.onnx.rewrite.group_query_attention import shared_inputs
from ..export.proof.levels import Proof, choose_proof, sampled
from ..export.proof.module_state import undisturbed
from ..export.proof.quality import SCORES, text_losses
from ..export.proof.replay import Case
from ..export.proof.report import TOLERANCES, ExportReport
from ..export.quantization.options import Quantization, WeightBits, choose_quantization, has_projections
from ..export.quantization.text_cases import text_cases
from ..files.scratch import publish_folder, scratch_for, settle
from ..generate.settings import settings_of
from ..huggingface.position_switch import rereads_at_switch, switch_of
from ..recipe.aliases import TransformersModel
from ..runners.open import RUNTIMES
from ..storage.cases import save_case
from .card import write_card
from .chat_prompts import CHAT_TOKENS, CHATS, chat_prompts
from .client_layout import Layout, apply_layout, check_layout
from .digests import digests
from .export_piece import export_piece
from .manifest import FolderManifest, write_manifest
from .pieces.positions import positions_of
from .pieces.tasks import GENERATES, SPEAKS, pieces_for, task_of
from .pieces.text import Piece, keeps_more
from .quality_text import python_text, read_prompts
from .sentence import read_modules, with_embedding
from .sidecar_files import (
    TOKENIZER_INPUTS,
    genai_config,
    state_tokenizer_inputs,
    write_companions,
    write_genai_config,
)
from .source.classes import without_peft
from .source.find import FoundModel, find_model, require_transformers
from .source.open import OpenedModel, WeightsIn, open_model
from .source.origin import origin_of, reader_of
from .source.stored_weights import UnmatchedWeights, check_unmatched
from .spoken_case import FRAMES, SAMPLED_FRAMES, spoken_case
from .stored_cases import PROMPT, SAMPLED_TOKENS, TOKENS, generation_case, stored_calls
from .targets import (
    FORMATS,
    Target,
    choose_bounds,
    choose_target,
    fitting_cases,
    fitting_text,
    room_for_tokens,
)
from .verify import FolderReport, verify_folder
from .writable import check_writable

__all__ = ["ExportedFolder", "export_folder"]

logger = logging.getLogger("yobx_flatten")

_LONGEST = 1024
"""The longest text that is generated from where positions change at a length; more take minutes."""

_CHATS = 10
"""Answers that a file with quantised weights is compared with."""

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "executorch", "openvino")


@dataclasses.dataclass(frozen=True)
class ExportedFolder:
    """The result of :func:`export_folder`.

    Attributes:
        path: the folder.
        task: task of the model, such as ``"text-generation"``.
        reports: one report per file, by its name.
        verified: results of the stored cases, replayed from the files.
    """

    path: pathlib.Path
    task: str
    reports: dict[str, ExportReport]
    verified: FolderReport

    def __str__(self) -> str:
        return "\n".join([*(f"{name}: {report}" for name, report in self.reports.items()), str(self.verified)])


def export_folder(
    model: TransformersModel | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    task: str = "auto",
    to: Literal["onnx", "program"] = "onnx",
    source: str | os.PathLike[str] | None = None,
    opset_version: int | None = None,
    batch: int | None = None,
    overwrite: bool = False,
    proof: Proof = "auto",
    quantize: WeightBits | Quantization | None = None,
    calibration: str | os.PathLike[str] | None = None,
    optimize: Literal["onnxruntime"] | None = None,
    logits: Literal["all", "last"] = "all",
    target: Target | None = None,
    bounds: Mapping[str, int] | None = None,
    dtype: str | None = None,
    weights: WeightsIn = "auto",
    unmatched_weights: UnmatchedWeights | None = None,
    trust_remote_code: bool = False,
    layout: Layout = "flat",
    word_times: bool = False,
) -> ExportedFolder:
    """Export a model of transformers to a folder that generation tools open, and prove that it generates the same.

    The folder appears when all of it is proven; until then the files are in a hidden folder next to it.

    Args:
        model: a model of transformers, in evaluation mode. Adapters of peft are weights of the files; merged ones
            (``model.merge_and_unload()``) take no operators of their own. Or the folder, the id of the hub or the type
            of a model, or a GGUF file, as ``yobx-flatten export`` takes them.
        folder: the folder to write; it must not exist, or be empty.
        task: the task to export for, which decides what becomes a file: see :data:`TASKS`. ``"auto"``, the default,
            takes the task of the model.
        to: format of the files: ``"onnx"``, the default, for onnxruntime, or ``"program"`` for ``torch.export``.
        source: the folder the model is from, whose tokenizer and processor are copied. By default the folder that
            ``model`` names, or was loaded from. Where that is not known, there is no tokenizer, and the report states
            why; a type or a ``config.json``, whose weights are random, gets one of bytes.
        opset_version: version of ONNX's operators; ``None``, the default, for what :func:`export_onnx` finds best.
        batch: a fixed batch size; ``None`` for any.
        overwrite: whether to replace the contents of ``folder``; ``False`` by default.
        proof: what is proven before the folder appears. ``"full"``: every file is replayed with the example and all
            cases, and 40 tokens are generated. ``"sample"``: the example, the largest case and 8 tokens. ``"none"``:
            nothing; the manifest, the report and :func:`verify_folder` state that the folder is unproven. ``"auto"``,
            the default, is ``"full"`` for weights of less than 1 GB, and ``"sample"`` for others.
        quantize: see :func:`export_onnx`. For a model that generates text the perplexity is measured on the source of
            modules of Python, in the tokens of the model; the folder keeps what the model made of it, and
            :func:`verify_folder` measures again. For a GGUF file whose weights are integers ``None``, the default, is
            ``"keep"``: they go into the files of onnxruntime as they are.
        calibration: a file of prompts, one in each line, for a model that generates text and is quantised: the bits are
            chosen by this text, and the folder is judged by the model's answers to the first ten. ``None``, the
            default, for the source of modules of Python and ten questions of our own.
        optimize: ``"onnxruntime"`` for attention that writes into the memory of the cache instead of copying it, where
            the model's layers allow it; see :func:`export_onnx`. ``None`` by default.
        logits: for a model that generates text, positions whose scores the file returns: ``"all"``, the default, as
            tools that score a text or check several drafted tokens at once need them, or ``"last"``, the one position
            that a token is chosen by. Reading a prompt takes less time and memory then; the perplexity of quantised
            weights cannot be measured.
        target: the runtime that the files are for: ``"onnxruntime"``, ``"torch"``, ``"aotinductor"``, ``"executorch"``
            or ``"openvino"``; ``None``, the default, for that of ``to``. Every file is replayed, and the tokens are
            generated, with that runtime.
        bounds: the largest sizes, ``{"batch": 4, "length": 512}``: rows, and tokens in the cache; ``"new"`` for tokens
            of one call, where these are fewer. ExecuTorch, which plans its memory, needs them. ``None`` by default.
        dtype: type of the weights of a model that is named, ``"float32"`` by default. A model has its own.
        weights: where the weights of a model that is named are meanwhile. ``"memory"`` loads them all. ``"stream"``
            reads them from the files of safetensors, those of a layer when it is called and each one when it is
            written, so that the memory holds one layer. ``"auto"``, the default, streams weights of more than a
            quarter of the free memory to ONNX files.
        unmatched_weights: what is done where the weights of a model that is named are not those of its class.
            ``"refuse"``, the default, raises, with their names. ``"unused"`` leaves out those that the class does not
            have; ``"random"`` also draws those that the folder lacks or has in another shape. The report
            names them.
        trust_remote_code: whether the code of a model that is named may run: classes in Python files next to its
            ``config.json`` (``auto_map``). ``False``, the default, refuses such a model, and never asks.
        layout: where the files are. ``"flat"``, the default, as optimum, sentence-transformers and onnxruntime-genai
            look for them; ``"transformers.js"`` for that library, in ``onnx/`` with the type of the weights in the name
            (``onnx/model_q4.onnx``), which these also open.
        word_times: whether the decoders of a Whisper also return the weights of attention by which
            ``generate(return_token_timestamps=True)`` finds out when each word was said, of the heads that
            ``generation_config.alignment_heads`` names. ``False`` by default: their layers are then not fused.

    Returns:
        The folder, with a report of every export and every replay.

    Raises:
        ModelSourceError: when a model that is named cannot be read, or its weights are not those of its class.
        InvalidArgumentError: when ``to`` or ``target`` is unknown, bounds are missing, or onnxruntime has no
            kernels for the type of the weights.
        FolderExistsError: when the folder is not empty.
        OSError: when it cannot be written; this is checked before anything is exported.
        NoRoomError: when the disk or the memory is too small; this is also checked before.
        ReplayError: when a file does not return what the model returns; nothing is written then.
        GenerationError: when the model cannot be cut into files that generate.
        MissingDependencyError: when an optional library is not installed.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama", to="program")
    >>> exported.verified.ok
    True
    """
    require_transformers("export_folder")
    if batch is None and (bounds or {}).get("batch") == 1:
        batch = 1  # the calls that prove a folder of several rows have three
    runtime = choose_target(to, target, bounds, batch)
    form, suffix, largest = FORMATS[runtime], RUNTIMES[runtime][0], choose_bounds(bounds, batch)
    place = pathlib.Path(folder)
    check_target(place, overwrite)
    opened = _open(model, dtype, weights, form, unmatched_weights, trust=trust_remote_code)
    model, source = without_peft(opened.model), opened.folder if source is None else source
    if largest is not None:
        largest.check_positions(model)
    dtype = str(model.dtype).removeprefix("torch.")
    proof = choose_proof(proof, model)
    if dtype not in TOLERANCES or (form == "onnx" and proof != "none" and not has_kernels(dtype)):
        raise InvalidArgumentError(
            f"Weights of {dtype} have no kernels in onnxruntime on the CPU. Take float32 or float16, or to='program'; "
            'or proof="none" for files of another provider, unproven.'
        )
    if task_of(model) in GENERATES and getattr(model, "generation_config", None) is not None:
        settings_of(model.config.to_dict(), model.generation_config.to_dict())  # raises for what files do not do
    if quantize is None and opened.has_integers and runtime == "onnxruntime":
        quantize = "keep"
    if quantize is not None and task_of(model) in SPEAKS:
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} reads each of its frames again, and nothing states how far weights in fewer "
            'bits may lead it. Leave quantize= out, or take dtype="float16".'
        )
    quantization = choose_quantization(quantize, model, "export_folder", runtime)
    if optimize not in (None, "onnxruntime") or (optimize is not None and form != "onnx"):
        raise InvalidArgumentError(f'optimize must be None, or "onnxruntime" for to="onnx"; found {optimize!r}.')
    prompts = () if calibration is None else read_prompts(calibration)
    if prompts and (quantization is None or quantization.tokens is not None or logits == "last"):
        raise InvalidArgumentError(
            "calibration= (--calibration) is the text of quantised weights: add quantize=, without tokens= of its own "
            'and without logits="last".'
        )
    room: dict[str, Any] = {"in_memory": 0 if proof == "none" else 1, "quantization": quantization, "proof": proof}
    check_room(model, place, **room)
    if form == "onnx":
        check_opset(opset_version)
    if logits == "last" and quantization is not None and quantization.tokens is not None:
        raise InvalidArgumentError('A text is scored at all of its positions: leave tokens= out with logits="last".')
    cut: dict[str, Any] = {"word_times": word_times, "logits": logits, "proof": proof if largest is None else "full"}
    started = ExportReport(type(model).__qualname__)
    whole_cache = optimize is not None
    with started.timed("inputs"):
        try:
            with undisturbed(model):  # positions can depend on the longest text that was read
                task, pieces = pieces_for(model, task, batch, whole_cache=whole_cache, **cut)
        except RuntimeError as error:
            if not opened.is_streamed or "meta" not in str(error):
                raise
            opened = opened.as_a_whole("a weight is read where its layer is not called")
            model = opened.model
            check_room(model, place, **room)
            task, pieces = pieces_for(model, task, batch, whole_cache=whole_cache, **cut)
    modules = read_modules(None if source is None else pathlib.Path(source))
    if modules is not None and task == "feature-extraction" and "input_ids" in pieces[0].kwargs:
        pieces = with_embedding(pieces, model, modules)
    tokens = None
    if quantization is not None and quantization.tokens is None and task == "text-generation" and logits == "all":
        rows = (8 if proof == "full" else 2) if batch is None else batch
        tokens = python_text(model, None if source is None else pathlib.Path(source), rows, "\n".join(prompts))
        if prompts and tokens is None:
            raise InvalidArgumentError(
                f"{calibration} has less than 16 tokens of {type(model).__qualname__}, or others."
            )
        quantization = dataclasses.replace(quantization, tokens=fitting_text(tokens, largest))
    elif prompts:
        raise InvalidArgumentError(f"calibration= (--calibration) is for models that generate text, not for {task}.")
    chats = None
    if quantization is not None and task == "text-generation" and proof == "full" and batch is None and largest is None:
        chats = chat_prompts(model, None if source is None else pathlib.Path(source), _CHATS, prompts)
    switch = switch_of(model.config.get_text_config(decoder=True).to_dict()) if task == "text-generation" else None
    rereads = None if switch is None else rereads_at_switch(model, switch)
    bits = None if quantization is None else quantization.weights
    check_layout(layout, form, task, bits, dtype)
    with scratch_for(place) as work:
        reports, cases = {}, {}
        shared: list[str] = []
        for piece in pieces:
            name = piece.stem + suffix
            quantized = quantization if has_projections(piece.module) else None
            how: dict[str, Any] = {"proof": proof, "quantize": quantized}
            if form == "onnx":
                how |= {"opset_version": opset_version, "optimize": optimize}
            reports[name] = export_piece(model, piece, work / name, batch, how, runtime, largest)
            shared = [] if optimize is None else shared_inputs(work / name)
            if not shared and keeps_more(piece, model):
                (piece,) = pieces_for(model, task, batch, **cut)[1]
                reports[name] = export_piece(model, piece, work / name, batch, {**how, "optimize": None}, runtime, None)
            reports[name].remark(*opened.remarks)
            if proof != "none":
                calls = fitting_cases(piece, largest)
                with reports[name].timed("store cases"):
                    cases[name] = _store_calls(piece, sampled(calls) if proof == "sample" else calls, work)
                    if quantized is not None and quantized.tokens is not None:
                        cases[name] += _store_text(piece, quantized.tokens, work)
        first = next(iter(reports.values()))
        first.seconds = started.seconds | first.seconds
        first.peak_growth = started.peak_growth | first.peak_growth
        if task in GENERATES and proof != "none":
            logger.info("generating with %s", type(model).__qualname__, extra=STEP)
            count = TOKENS if proof == "full" else SAMPLED_TOKENS
            with first.timed("generate"):
                cases[""] = [_store_generation(model, task, batch, room_for_tokens(largest, count), work)]
                crosses = rereads is not None and proof == "full" and largest is None
                if switch is not None and crosses and 4 < switch <= _LONGEST:
                    cases[""].append(_store_generation(model, task, batch, 12, work, switch - 3))
                if chats is not None:
                    cases[""].append(_store_chats(model, task, chats, work))
        if task in SPEAKS and proof != "none":
            with first.timed("generate"):
                cases[""] = [_store_speech(model, batch or 2, FRAMES if proof == "full" else SAMPLED_FRAMES, work)]
        if modules is not None and (modules.why_not is not None or task != "feature-extraction"):
            why = modules.why_not or f"{task} has no hidden states among its outputs"
            first.remark(f"there is no sentence_embedding in the file: {why}. sentence-transformers computes it")
        write_companions(work, model, None if source is None else pathlib.Path(source), reads_bytes=opened.reads_bytes)
        if not reader_of(work):
            why = opened.no_folder if source is None else f"{source} holds none"
            first.remark(f"there is no tokenizer in the folder: {why}. Name a folder with its files: source=FOLDER")
        if task != "image-text-to-text":  # where a processor hands over more
            state_tokenizer_inputs(work, [name for name in TOKENIZER_INPUTS if name in pieces[0].kwargs])
        if task == "text-generation" and form == "onnx":
            contents = genai_config(model, reports["model.onnx"].input_names, shared=shared)
            if contents is not None:
                write_genai_config(work, contents)
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES if is_installed(name)}
        names = [piece.stem + suffix for piece in pieces]
        if layout != "flat":
            names = apply_layout(work, names, bits, dtype)
        name, tolerance = type(model).__qualname__, TOLERANCES[dtype]
        cache = "shared" if shared else "growing"
        quality = {name: report.quality for name, report in reports.items() if report.quality}
        measured = {name: dict(one.yardstick.largest) for name, one in reports.items() if one.yardstick is not None}
        described = (name, task, form, dtype, tolerance, names, cases, versions, proof, quality, cache)
        made = sorted(file.name for file in work.iterdir() if file.suffix in (suffix, ".bin"))
        sha256 = {} if runtime in ("onnxruntime", "torch") else digests(work, made)
        asks = task in GENERATES and not opened.is_streamed  # each call would read all weights
        positions = positions_of(model, is_large=proof != "full") if asks else None
        write_manifest(work, FolderManifest(*described, runtime, sha256, rereads, positions, measured))
        verified = verify_folder(work, trust=True)  # of what was made here
        if not verified.ok and proof != "none":
            raise ReplayError(f"The exported {type(model).__qualname__} does not do what the model does.\n{verified}")
        if quality:
            is_own = quantization is not None and quantization.tokens is not None and tokens is None
            text = (
                "a text" if is_own else "sources of Python" if calibration is None else pathlib.Path(calibration).name
            )
            counts = {check.case: check.tokens for check in verified.checks if check.tokens is not None}
            write_card(work, name, text, quality, counts)
        publish_folder(work, place)
    return ExportedFolder(place, task, reports, dataclasses.replace(verified, path=place))


def _open(
    model: TransformersModel | str | os.PathLike[str] | FoundModel,
    dtype: str | None,
    weights: WeightsIn,
    to: str,
    unmatched: UnmatchedWeights | None,
    *,
    trust: bool,
) -> OpenedModel:
    """The model itself, or the one that is named."""
    if isinstance(model, (str, os.PathLike, FoundModel)):
        found = model if isinstance(model, FoundModel) else find_model(os.fspath(model), trust_remote_code=trust)
        if unmatched is not None:
            check_unmatched(unmatched)
            found = dataclasses.replace(found, unmatched_weights=unmatched)
        return open_model(found, dtype=dtype or "float32", weights=weights, to=to)
    given = {"dtype": dtype, "weights": None if weights == "auto" else weights, "unmatched_weights": unmatched}
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(f"{name}={value!r} is for a model that is named; a loaded one has its own.")
    folder, no_folder = origin_of(without_peft(model))
    return OpenedModel(model, folder, no_folder=no_folder)


def check_target(folder: pathlib.Path, overwrite: bool) -> None:
    """Check that a folder is empty or may be replaced, and can be written."""
    settle(folder)  # what a killed export was about to replace is there again
    if folder.exists() and not folder.is_dir():
        raise FolderExistsError(f"{folder} is a file. Name a folder that is new or empty.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FolderExistsError(
            f"{folder} holds something already. Name another folder, or pass overwrite=True (--overwrite)."
        )
    check_writable(folder, in_parent=True)


def _store_calls(piece: Piece, cases: Sequence[Case], work: pathlib.Path) -> list[str]:
    (work / "cases").mkdir(exist_ok=True)
    names = []
    for number, (name, inputs, outputs) in enumerate(stored_calls(piece, cases)):
        # not .onnx: tools look for models by that suffix, also in folders below
        names.append(f"cases/{piece.stem}-{number}.case")
        save_case(work / names[-1], inputs, outputs, name=name)
    return names


def _store_text(piece: Piece, tokens: torch.Tensor, work: pathlib.Path) -> list[str]:
    """Store what the model makes of a text: its losses, since the scores are larger than the model."""
    names = []
    for number, case in enumerate(text_cases(piece.module, piece.kwargs, tokens)):
        ((_, inputs, outputs),) = stored_calls(dataclasses.replace(piece, kwargs=case.kwargs), ())
        names.append(f"cases/{piece.stem}-text-{number}.case")
        save_case(work / names[-1], inputs, text_losses(outputs[SCORES], inputs["input_ids"]), name=case.name)
    return names


def _store_generation(
    model: TransformersModel, task: str, batch: int | None, tokens: int, work: pathlib.Path, after: int = 0
) -> str:
    """Store what the model generates, after a short prompt, or ``after`` so many tokens."""
    case = generation_case(model, task, batch or 3, tokens, after or PROMPT)
    outputs = {"sequences": case.sequences, "new_tokens": case.new_tokens, "margins": case.margins}
    path, text = f"cases/generate{f'-{after}' if after else ''}.case", f"{case.new_tokens} tokens, greedily"
    save_case(work / path, case.inputs, outputs, name=f"{text}, after {after}" if after else text)
    return path


def _store_speech(model: TransformersModel, rows: int, calls: int, work: pathlib.Path) -> str:
    """Store the spectrogram that the model makes."""
    case = spoken_case(model, rows, calls)
    path = "cases/generate.case"
    save_case(work / path, case.inputs, case.outputs, name=f"{calls} calls of the decoder, rows {rows}")
    return path


def _store_chats(model: TransformersModel, task: str, prompts: dict[str, torch.Tensor], work: pathlib.Path) -> str:
    """Store what the model answers."""
    case = generation_case(model, task, tokens=CHAT_TOKENS, prompts=prompts)
    outputs = {"sequences": case.sequences, "new_tokens": case.new_tokens, "margins": case.margins}
    name = f"{len(case.sequences)} chats, {case.new_tokens} tokens, greedily"
    save_case(work / CHATS, case.inputs, outputs, name=name)
    return CHATS
