"""Export a model to a folder, which is created only after the exported files were checked."""

# model ──> pieces ──> export_onnx ──> cases ──> companions ──> generate like the model? ──> rename
#           modules    replayed        stored    tokenizer

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from .. import errors
from ..core.compare import WEIGHT_TYPES, tolerance
from ..core.files.document import TEXTS, own_files, read_document, write_tensor_file
from ..core.files.scratch import check_writable, publish_folder, scratch_for, settle
from ..errors import FolderExistsError, InvalidArgumentError, ModelSourceError, ReplayError, describe_class
from ..errors.failures import STEP
from ..export.model_facts import ModelFacts
from ..export.onnx.rewrite.group_query_attention import shared_inputs
from ..export.proof.eager_runs import Proof, sampled
from ..export.proof.quality import Quality
from ..export.proof.report import ExportReport
from ..export.quantization import Quantization, WeightBits
from ..registry.recipe.aliases import TransformersModel
from ..runners.adapters import ADAPTERS, Adapter, check_matrices, leave_room, rooms_of_files
from ..runners.ports import to_value, value_type
from ..trees.arguments import instance_hint
from . import stored_cases
from .client_layout import apply_layout, write_genai_files
from .export_piece import Adapters, FolderOptions, Layout, Target, export_piece, fitting_cases
from .manifest import FolderManifest, StoredAdapter, digests, write_manifest
from .pieces import spoken
from .pieces.tasks import GENERATES, SPEAKS
from .pieces.text import positions_of
from .plan import FolderPlan, plan_folder
from .sentence import copy_modules
from .source.adapter import ADAPTER, rooms_of
from .source.configuration import change_json, write_json
from .source.find import FoundModel, find_model, origin_of, reader_of, require_transformers, without_peft
from .source.gguf_file import gguf_tokenizer
from .source.open import OpenedModel, WeightsIn, open_model
from .source.packed_weights import UnmatchedWeights
from .texts import CHAT_TOKENS, CHATS
from .verify import FolderReport, TokenCount, verify_folder

logger = logging.getLogger("yobx_flatten")

_LONGEST = 1024  # largest number of tokens generated to check a model whose rotary angles change at some length

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "executorch", "openvino")


@dataclasses.dataclass(frozen=True)
class ExportedFolder:
    """The result of :func:`export_folder`: the path, the reports of the exports, and the checks of the files.

    Attributes:
        path: the folder.
        task: task of the model, such as ``"text-generation"``.
        reports: the export report of each file, by name of the exported file.
        verified: the comparisons of the files with the model on the stored test cases.
    """

    path: pathlib.Path
    task: str
    reports: dict[str, ExportReport]
    verified: FolderReport

    def __str__(self) -> str:
        return "\n".join([*(f"{name}: {report}" for name, report in self.reports.items()), str(self.verified)])


def export_folder(  # noqa: D417 # arguments that belong together are described together
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
    adapters: Adapters | None = None,
) -> ExportedFolder:
    """Export a Hugging Face model to a folder for generation tools, and check that the files generate the same tokens.

    The folder is created only if every check passes. The guide lists :ref:`each argument <arguments-of-export-folder>`.

    Args:
        model: a model in evaluation mode, or the name of a model.
        source: the folder with the tokenizer; by default the folder of the model.
        folder, overwrite: the folder to write, and whether to replace its contents.
        task: the task of the files, see :data:`TASKS`; ``"auto"`` for the task of the model.
        to: the file format, ``"onnx"`` (the default) or ``"program"``; ignored if ``target`` is passed.
        target: the runtime of the files; by default onnxruntime for ``to="onnx"``, and torch for ``to="program"``.
        batch: a fixed batch size; ``None``, the default, for files that accept different batch sizes.
        bounds: largest sizes, such as ``{"length": 512}``. ExecuTorch needs bounds; onnxruntime accepts only ``None``.
        proof: checks to run: ``"full"``, ``"standard"``, ``"sample"``, ``"none"``; ``"auto"`` chooses by model size.
        opset_version, optimize, quantize: options for each ONNX file, see :func:`export_onnx`.
        calibration: a text file of prompts with which quantized weights are calibrated and measured.
        logits, word_times: which logits the files return, and whether Whisper files also return attention weights.
        layout: the names and places of the files: ``"flat"`` (the default), ``"transformers.js"`` or ``"genai"``.
        adapters: folders of LoRA adapters by name, which ``generate(adapter=NAME)`` selects; none by default.
        dtype, weights, unmatched_weights, trust_remote_code: how a model given by name is loaded.

    Returns:
        The path of the folder, a report on each exported file, and the results of the checks.

    Raises:
        ModelSourceError, InvalidArgumentError, GenerationError: when the model or an option is not supported.
        FolderExistsError, NoRoomError, OSError: when the folder cannot be written; this is checked before the export.
        ReplayError: when a file and the model return different values, in which case nothing is written.
        MissingDependencyError: when an optional library is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # "llama" names a small model with random weights
    ...     export_folder("llama", f"{folder}/llama", to="program").verified.ok
    True
    """
    require_transformers("export_folder")
    given = {name: value for name, value in locals().items() if name not in ("model", "folder", "overwrite")}
    options = FolderOptions(**given)
    path: Any = folder
    if not isinstance(path, (str, os.PathLike)):
        line = "The model is the first argument:\n    export_folder(model, FOLDER)"
        raise InvalidArgumentError(f"folder: expected a path, found {describe_class(path)}. {line}")
    place = pathlib.Path(path)
    check_target(place, overwrite)
    if adapters is not None and weights == "stream":
        raise InvalidArgumentError('adapters= needs the model in memory, without weights="stream". Leave weights= out.')
    plan = plan_folder(_open(model, options), place, options)
    with scratch_for(place) as work:  # under a hidden name, until all checks pass
        made = _Made(work, adapters={adapter.name: StoredAdapter() for adapter in plan.adapters})
        with leave_room(plan.model, {} if adapters is None else rooms_of(plan.model, plan.adapters)):
            _write_files(plan, made)
        _write_cases(plan, made)
        _write_configuration(plan, made)
        write_matrices(work, plan.adapters)
        manifest = _described(plan, made)
        logger.info("verifying the folder", extra={**STEP, "share": 0.8})
        with made.first.timed("verify"):
            verified = verify_folder(work, trust=True)  # this process wrote the files
        if not verified.ok and plan.proof != "none":
            raise ReplayError(f"The exported {manifest.model} differs from the model. Nothing was written.\n{verified}")
        if manifest.quality:
            counts = {check.case: check.tokens for check in verified.checks if check.tokens is not None}
            write_card(work, manifest.model, plan.text, manifest.quality, counts)
        publish_folder(work, place)
    return ExportedFolder(place, plan.task, made.reports, dataclasses.replace(verified, path=place))


@dataclasses.dataclass
class _Made:
    work: pathlib.Path  # the hidden folder
    reports: dict[str, ExportReport] = dataclasses.field(default_factory=dict)  # by file name
    cases: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # paths of stored cases, by file name
    shared: list[str] = dataclasses.field(default_factory=list)  # inputs of the last file with shared memory
    adapters: dict[str, StoredAdapter] = dataclasses.field(default_factory=dict)  # by adapter name

    @property
    def first(self) -> ExportReport:
        """The report on the first exported file; this report also has notes and times of the whole folder."""
        return next(iter(self.reports.values()))


def _write_files(plan: FolderPlan, made: _Made) -> None:
    options, work, model_name = plan.options, made.work, type(plan.model).__qualname__
    for piece in plan.pieces:
        name = piece.stem + options.suffix
        quantized = plan.quantization if ModelFacts.of(piece.module).matrix_types else None
        how = plan.proof, quantized, plan.adapters
        report = export_piece(model_name, piece, work / name, options, *how)
        made.shared = [] if options.optimize is None else shared_inputs(work / name)
        if not made.shared and piece.keeps_more:
            # without shared memory, a cache that keeps the tokens outside the window has no advantage
            piece, plain = plan.sliding_piece(), dataclasses.replace(options, optimize=None)
            report = export_piece(model_name, piece, work / name, plain, *how)
        report.remark(*plan.opened.remarks)
        made.reports[name] = report
        if plan.proof == "none":
            continue
        calls = fitting_cases(piece, options.largest)
        with report.timed("store cases"):
            runs, report.runs = report.runs, None
            tokens, few = None if quantized is None else quantized.tokens, sampled(calls)
            chosen = few if plan.proof == "sample" else calls
            made.cases[name] = stored_cases.store_piece(piece, chosen, tokens, work, runs=runs)
            for adapter in plan.adapters:
                stored, below = made.adapters[adapter.name], f"{stored_cases.CASES}/{ADAPTERS}/{adapter.name}"
                with adapter.active():
                    stored.cases[name] = stored_cases.store_piece(piece, few, tokens, work, below)
                if adapter.name in report.of_adapters:
                    stored.quality[name] = report.of_adapters[adapter.name]
    # the first report also gets the time before the exports
    first, before = made.first, plan.timed
    first.seconds = before.seconds | first.seconds
    first.processor_seconds = before.processor_seconds | first.processor_seconds
    first.peak_growth = before.peak_growth | first.peak_growth


def _write_cases(plan: FolderPlan, made: _Made) -> None:
    if plan.task not in (*GENERATES, *SPEAKS) or plan.proof == "none":
        return
    model, options, work = plan.model, plan.options, made.work
    if plan.task in SPEAKS:
        with made.first.timed("generate"):
            rows, calls = options.batch or 2, spoken.FRAMES if plan.is_whole else spoken.SAMPLED_FRAMES
            case, text = spoken.spoken_case(model, rows, calls), f"{calls} calls of the decoder, rows {rows}"
            made.cases[""] = [stored_cases.store(case, work, f"{stored_cases.CASES}/generate.case", text)]
        return
    logger.info("generating with %s", type(model).__qualname__, extra={**STEP, "share": 0.7})
    count = stored_cases.TOKENS if plan.is_whole else stored_cases.SAMPLED_TOKENS
    if options.largest is not None and options.largest.length is not None:
        count = min(count, options.largest.length - stored_cases.PROMPT - 3)
    with made.first.timed("generate"):
        found = []
        if plan.chats is None or plan.proof == "full":  # otherwise the chats replace this case
            found.append(stored_cases.store_generation(model, plan.task, options.batch, count, work))
        crosses = plan.rereads is not None and plan.is_whole and options.largest is None
        if plan.switch is not None and crosses and 4 < plan.switch <= _LONGEST:
            found.append(stored_cases.store_generation(model, plan.task, options.batch, 12, work, plan.switch - 3))
        if plan.chats is not None:
            asked = CHAT_TOKENS if plan.proof == "full" else stored_cases.TOKENS
            case = stored_cases.generation_case(model, plan.task, tokens=asked, prompts=plan.chats)
            text = f"{len(case.outputs['sequences'])} chats, {case.outputs['new_tokens']} tokens, greedily"
            found.append(stored_cases.store(case, work, CHATS, text))
        for adapter in plan.adapters:
            below = f"{stored_cases.CASES}/{ADAPTERS}/{adapter.name}"
            with adapter.active():
                generated = stored_cases.store_generation(model, plan.task, options.batch, count, work, below=below)
            made.adapters[adapter.name].cases[""] = [generated]
    made.cases[""] = found


def _write_configuration(plan: FolderPlan, made: _Made) -> None:
    model, work, task, modules = plan.model, made.work, plan.task, plan.modules
    if isinstance(modules, str) or (modules and task != "feature-extraction"):
        why = modules if isinstance(modules, str) else f"{task} has no hidden states among its outputs"
        made.first.remark(f"there is no sentence_embedding in the file: {why}. sentence-transformers computes it")
    cache = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if cache is not None and task in GENERATES:
        made.first.remark(
            f"generation_config.json is written without cache_implementation={cache!r}: the files keep keys and values "
            "as the model computes them, and were checked in this form"
        )
    write_companions(work, model, plan.source, reads_bytes=not plan.opened.no_folder)
    if not reader_of(work):
        why = plan.opened.no_folder if plan.source is None else f"{plan.source} holds none"
        made.first.remark(f"there is no tokenizer in the folder: {why}. Name a folder with its files: source=FOLDER")
    # the tokenizer returns only the inputs of the file; a processor passes more inputs
    names = [name for name in TOKENIZER_INPUTS if name in plan.pieces[0].kwargs]
    path = work / "tokenizer_config.json"
    if task != "image-text-to-text" and "input_ids" in names and path.exists():
        stated = read_document(path, dict[str, Any], failure=ModelSourceError, finite=False)
        # transformers 4 knows this class by its other name only
        if stated.get("tokenizer_class") == "TokenizersBackend":
            stated["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(path, {**stated, "model_input_names": names})
    if plan.options.name == "onnx":
        write_genai_files(work, model, task, made.reports, made.shared, plan.options)


def _described(plan: FolderPlan, made: _Made) -> FolderManifest:
    """Move exported files to the paths of the chosen layout, and write the manifest."""
    options, work = plan.options, made.work
    names = [piece.stem + options.suffix for piece in plan.pieces]
    if options.layout == "transformers.js":
        names = apply_layout(work, names, plan.bits, plan.dtype)
    # the other runtimes do not check whether a file was changed
    parts = sorted(file.name for file in work.iterdir() if file.suffix in (options.suffix, ".bin"))
    is_in_place = any(report.in_place for report in made.reports.values())
    asks = plan.task in GENERATES and not plan.opened.is_streamed  # each call of a streamed model reads all weights
    manifest = FolderManifest(
        model=type(plan.model).__qualname__,
        task=plan.task,
        format=options.name,
        dtype=plan.dtype,
        tolerance=tolerance("file", plan.dtype),
        files=names,
        cases=made.cases,
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES if errors.is_installed(name)},
        proof=plan.proof,
        quality={name: report.quality for name, report in made.reports.items() if report.quality},
        cache="shared" if made.shared else "in_place" if is_in_place else "growing",
        runtime=options.runtime,
        sha256={} if options.runtime in ("onnxruntime", "torch") else digests(work, parts),
        rereads_at_switch=plan.rereads,
        positions=positions_of(plan.model, is_large=not plan.is_whole) if asks else None,
        tolerances={
            name: dict(one.yardstick.largest) for name, one in made.reports.items() if one.yardstick is not None
        },
        adapters=made.adapters,
    )
    write_manifest(work, manifest)
    return manifest


def _open(model: TransformersModel | str | os.PathLike[str] | FoundModel, options: FolderOptions) -> OpenedModel:
    dtype, weights, unmatched = options.dtype, options.weights, options.unmatched_weights
    if isinstance(model, (str, os.PathLike, FoundModel)):
        trust = options.trust_remote_code
        found = model if isinstance(model, FoundModel) else find_model(os.fspath(model), trust_remote_code=trust)
        if unmatched is not None:
            if unmatched not in get_args(UnmatchedWeights):
                choices = ", ".join(map(repr, get_args(UnmatchedWeights)))
                raise InvalidArgumentError(f"unmatched_weights must be one of {choices}, found {unmatched!r}.")
            found = dataclasses.replace(found, unmatched_weights=unmatched)
        stated = found.config.architectures
        task = options.task
        if task == "auto" and str(next(iter(stated or ()), "")).endswith("ForPreTraining"):
            task = "feature-extraction"  # without the head that the model was trained with
        found = found.for_task(task)
        wanted = str(dtype or "float32").removeprefix("torch.")
        if wanted not in WEIGHT_TYPES:
            raise InvalidArgumentError(f"dtype must be one of {', '.join(WEIGHT_TYPES)}, found {dtype!r}.")
        opened = open_model(found, dtype=wanted, weights=weights, to=options.name)
        if not stated or stated == found.config.architectures:
            return opened
        noted = f"{type(opened.model).__name__} was exported for {task}; the model is stored as a {stated[0]}."
        return dataclasses.replace(opened, remarks=(noted, *opened.remarks))
    given = {"dtype": dtype, "weights": None if weights == "auto" else weights, "unmatched_weights": unmatched}
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(
                f"{name}={value!r} is for a model given by name or folder, not for a loaded model. Leave {name} out."
            )
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InvalidArgumentError(
            f"export_folder takes a Hugging Face model, or its folder or name; found {describe_class(model)}."
            + (instance_hint(model) or " For your own module:\n    export_onnx(module, args, path=...)")
        )
    model = without_peft(model)
    folder, no_folder = origin_of(model)
    return OpenedModel(model, folder, no_folder=no_folder)


def check_target(folder: pathlib.Path, overwrite: bool) -> None:
    settle(folder)  # restores a folder that a killed export was about to replace
    if folder.exists() and not folder.is_dir():
        raise FolderExistsError(f"{folder} is a file. Name a folder that is new or empty.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FolderExistsError(f"{folder} is not empty. Name another folder, or pass overwrite=True (--overwrite).")
    check_writable(folder)


def write_card(
    folder: pathlib.Path, name: str, text: str, qualities: Mapping[str, Quality], tokens: Mapping[str, TokenCount]
) -> None:
    if (folder / "README.md").exists():
        return
    rows = []
    for file, quality in qualities.items():
        size = sum(path.stat().st_size for path in (folder / file, folder / f"{file}.data") if path.exists())
        rows.append((f"size of {file}", f"{size / 1e6:.1f} MB, {quality.weights}"))
        ratio, divergence = quality.perplexity_ratio, quality.text_divergence
        if ratio is not None and quality.text_tokens:
            rows.append((f"perplexity on {quality.text_tokens} tokens of {text}", f"{ratio:.4f} of the model's"))
        divergence = quality.divergence if divergence is None else divergence
        if divergence is not None:
            rows.append(("Kullback-Leibler divergence of its scores", f"{divergence:.4f} nats"))
        if ratio is None:
            rows.append(("difference of its outputs", f"{quality.relative_difference:.1%} of their size"))
    for case, count in tokens.items():
        if count.agreed is not None:
            rows.append((f"the same greedy token, {case}", f"{count.agreed:.1%} after the model's own text"))
    lines = [f"# {name}, quantised", "", "Exported with yobx-flatten, and measured next to the model:", ""]
    lines += ["| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows), ""]
    lines += ["`yobx-flatten verify FOLDER` repeats the measurement, without the model.", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


# names of the tensors that a tokenizer may return for a text or a pair of texts
TOKENIZER_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
_OF_CACHES = ("cache_implementation", "cache_config", "max_cache_len")
# the adapter's configuration is left out, because the adapter is merged into the weights
_WRITTEN_ANEW = {"config.json", "generation_config.json", ADAPTER}


def write_companions(
    folder: pathlib.Path, model: TransformersModel, source: pathlib.Path | None, *, reads_bytes: bool = False
) -> None:
    # source: the folder of the model, whose tokenizer and processor are copied, or its GGUF file; `None` if unknown
    # reads_bytes: whether a model without a folder gets a tokenizer of bytes, because its weights are random
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # the configuration of a base model may name a class with a head
    config.save_pretrained(folder)
    # auto_map names Python files, which are not copied and which exported files do not need
    change_json(folder / "config.json", {"auto_map": None})
    if getattr(model, "generation_config", None) is not None:
        generation = copy.deepcopy(model.generation_config)
        for name in _OF_CACHES:  # the files have their own cache
            if getattr(generation, name, None) is not None:
                setattr(generation, name, None)
        generation.save_pretrained(folder)
    if source is None and reads_bytes:
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    if source is None:
        return
    if source.is_file():
        gguf_tokenizer(source).save_pretrained(folder)
    for path in own_files(source, TEXTS, ModelSourceError):
        if path.name not in _WRITTEN_ANEW and not path.name.endswith(".index.json"):
            copied = folder / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)
    copy_modules(source, folder)


def write_matrices(folder: pathlib.Path, adapters: Sequence[Adapter]) -> None:
    rooms = rooms_of_files(folder) if adapters else {}
    for adapter in adapters:
        check_matrices(adapter.matrices, rooms, f"The adapter {adapter.name!r}")
        place = folder / ADAPTERS
        place.mkdir(exist_ok=True)
        write_tensor_file(place / f"{adapter.name}.safetensors", adapter.matrices)
        if (folder / "genai_config.json").is_file():
            import onnxruntime

            values = {}
            for name, matrix in adapter.matrices.items():
                values[name] = to_value(name, value_type(str(matrix.dtype).removeprefix("torch.")), matrix)
            form = onnxruntime.AdapterFormat()
            form.set_adapter_version(1)
            form.set_model_version(1)
            form.set_parameters(values)
            form.export_adapter(str(place / f"{adapter.name}.onnx_adapter"))
