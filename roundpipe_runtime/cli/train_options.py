"""Define the options of ``roundpipe train`` in the order of ``--help``, with a dataclass for each group of options."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
import typer

from yobx_flatten.core.files.document import read_text
from yobx_flatten.core.terminal.command_line import UserError, meant_option
from yobx_flatten.errors import require
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.model_folder.source.find import MODEL_NAMES, find_model

from ..device.accelerator import parse_devices
from ..device.disk import HOST_IN_MEMORY, disk_folder
from ..device.protocol import Device
from ..device.virtual import VirtualDevice
from ..distributed.ranks.torchrun import own_devices
from ..errors import ConfigError, DeviceError
from ..fine_tune import ModelSource, Settings, Tokenizer, check_curve, check_output, check_place, model_source
from .option_objects import option, parse_bytes, parse_gigabytes

_TEXT, _STEP, _RATE, _FILES = "Text", "A step", "Learning", "What is written"


def _number(text: str, panel: str, *, least: int = 1) -> Any:
    return option("N", text, panel, min=least)


def _path(text: str, *, metavar: str = "FILE") -> Any:
    return option(metavar, text, _FILES)


def _choice(text: str, panel: str, *names: str) -> Any:
    """Declare an option without a metavar: a flag, or an option whose values typer lists."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


Batch = Annotated[int, _number("Rows per batch, summed over all processes.", _STEP)]
Microbatches = Annotated[
    int | None, _number("Microbatches per batch (train --replicas: per group of rows; default: devices + 1).", _STEP)
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"], _choice("Data type of the weights; auto: as stored in the model.", _STEP)
]
OptimDtype = Annotated[
    Literal["float32", "bfloat16", "same"],
    _choice("Data type in which AdamW updates weights; same: the data type of the weights.", _STEP),
]
KeepParameters = Annotated[
    str, option("GB", "GB of parameters that stay on each device between steps; auto: as many as fit.", _STEP)
]
LargeTables = Annotated[
    Literal["auto", "whole", "slices"],
    _choice(
        "How embeddings and LM heads of at least 16 MiB are copied to a device. auto: only used rows of embeddings, "
        "and a head in slices if too large. slices: as auto, but every head in slices. whole: like other weights.",
        _STEP,
    ),
]
Update = Annotated[
    Literal["masters", "in_place", "in_backward"],
    _choice(
        "What AdamW updates. masters: copies of the weights in --optim-dtype; in_place: the weights themselves, "
        "kept in --optim-dtype; in_backward: as in_place, but during backward, so that each gradient is freed at once. "
        "in_backward cannot clip or accumulate gradients. All three give the same results.",
        _STEP,
    ),
]
Quantize = Annotated[
    Literal["none", "nf4", "fp4", "int8"],
    option("KIND", "With --lora: format of frozen weights: none, nf4 or fp4 (bitsandbytes), int8 (torchao).", _RATE),
]
QuantizeAware = Annotated[
    Literal["none", "int4", "int8"],
    _choice("Train with weights (plus LoRA) rounded to this type, for yobx-flatten export --quantize keep.", _RATE),
]
Host = Annotated[
    str,
    option(
        "PLACE",
        "Where weights, gradients and optimizer state are kept: memory (CPU), or disk:DIR (files in folder DIR).",
        _STEP,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [FILES]...",
            help=MODEL_NAMES + " Further arguments are text files, so that --text *.txt works without quotes.",
        ),
    ] = None
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="MODEL; all arguments are then text files.")] = None
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the trained model (required)."),
    ] = None
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file of options, with lines like batch: 4. The command line overrides it.",
            is_eager=True,  # read first: it sets the defaults of the other options
            callback=read_config_file,
        ),
    ] = None
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options and their values as YAML for --config, and exit.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; other text goes to stderr.")] = False

    def __post_init__(self) -> None:
        if self.print_config:
            return
        if self.model is None and not self.words:
            raise UserError("Missing argument 'MODEL' (see --help)")
        if self.output is None:
            raise UserError("Missing option '--output' / '-o' (see --help)")

    @property
    def name(self) -> str:
        return self.model if self.model is not None else (self.words or [""])[0]

    @property
    def more_text(self) -> list[str]:
        """The text files among the command's arguments."""
        return list(self.words or [])[0 if self.model is not None else 1 :]

    @property
    def folder(self) -> pathlib.Path:
        return self.output or pathlib.Path()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    text: Annotated[
        list[str] | None,
        option(
            "FILES",
            "Training text: a text file, a file of JSON, Parquet or CSV, a folder of such files, a folder that the "
            "library datasets saved, or a pattern such as 'texts/*.txt'.",
            _TEXT,
        ),
    ] = None
    field: Annotated[str, option("NAME", "JSON field, or column of a table, that holds the text.", _TEXT)] = "text"
    chat: Annotated[
        list[str] | None,
        option(
            "FILES",
            "Files of conversations, instead of --text; only answers are trained. A row has messages, ShareGPT or "
            "Alpaca fields, or a prompt and a completion.",
            _TEXT,
        ),
    ] = None
    chat_template: Annotated[
        pathlib.Path | None, option("FILE", "Chat template to use instead of the tokenizer's.", _TEXT)
    ] = None
    ignore_fields: Annotated[
        str | None, option("NAMES", "Fields of conversations to ignore, separated by commas: source,score.", _TEXT)
    ] = None
    pack: Annotated[
        bool,
        _choice("Pack several conversations into each row; no token attends to another conversation.", _TEXT, "--pack"),
    ] = False
    show_rows: Annotated[
        int,
        _number("With --chat: number of rows to print before training, with trained tokens marked.", _TEXT, least=0),
    ] = 2
    tokenizer: Annotated[
        str | None,
        option(
            "DIR",
            "Folder or GGUF file of a tokenizer, or the word bytes for one token per byte (default: the tokenizer of "
            "the model; bytes if a model with random weights has none).",
            _TEXT,
        ),
    ] = None
    length: Annotated[int | None, _number("Tokens per row (default: model limit, at most 512).", _TEXT, least=2)] = None
    eval_share: Annotated[
        float, option("X", "Share of the rows that is held out for evaluation.", _TEXT, min=0.0, max=0.9)
    ] = 0.02

    def __post_init__(self) -> None:
        if self.chat and self.text:
            raise UserError("--text and --chat cannot be combined. Leave one of them out")
        for name, is_given in (("--chat-template", self.chat_template), ("--pack", self.pack)):
            if is_given and not self.chat:
                raise UserError(f"{name} applies to conversations only. Name a file of conversations: --chat FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    devices: Annotated[
        str, option("DEVICES", "auto (all GPUs), virtual:N (N devices simulated on the CPU), or cuda:0,cuda:1.", _STEP)
    ] = "auto"
    memory: Annotated[
        str | None, option("SIZE", "Memory limit of each virtual device, like 200MB (default: none).", _STEP)
    ] = None
    batch: Batch = 8
    microbatches: Microbatches = None
    replicas: Annotated[
        int | None, _number("Groups of rows into which a batch is split (default: one per process).", _STEP)
    ] = None
    accumulate: Annotated[int, _number("Batches per optimizer step (gradient accumulation).", _STEP)] = 1
    steps: Annotated[int | None, _number("Number of optimizer steps, instead of --epochs.", _STEP)] = None
    epochs: Annotated[int | None, _number("Passes over the data (default: 1).", _STEP)] = None
    dtype: Dtype = "auto"
    unmatched_weights: Annotated[
        Literal["refuse", "unused", "random"],
        _choice(
            "If the folder's weights do not fit the model: refuse raises an error; unused ignores weights that "
            "the model lacks; random also gives random values to weights that the folder lacks.",
            _STEP,
        ),
    ] = "refuse"
    optim_dtype: OptimDtype = "float32"
    keep_parameters: KeepParameters = "0"
    large_tables: LargeTables = "auto"
    host: Host = HOST_IN_MEMORY
    update: Update = "masters"

    def __post_init__(self) -> None:
        check_host_option(self.host, self.update)
        if self.update != "masters" and self.replicas is not None:
            raise UserError(f"--update {self.update} does not work with --replicas. Remove --replicas {self.replicas}")
        if self.steps is not None and self.epochs is not None:
            raise UserError("--steps and --epochs both set the length of the training. Leave one of them out")
        parse_gigabytes(self.keep_parameters, "--keep-parameters")
        if self.memory is not None:
            parse_bytes(self.memory, "--memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningOptions:
    lora: Annotated[
        str | None,
        option("R[,ALPHA[,NAMES]]", "Train LoRA adapters only: rank[,alpha[,modules]], like 8 or 8,16,q_proj.", _RATE),
    ] = None
    quantize: Quantize = "none"
    quantize_aware: QuantizeAware = "none"
    lr: Annotated[float, option("X", "Peak learning rate.", _RATE)] = 0.0003
    warmup: Annotated[
        int | None, _number("Warmup steps to reach --lr (default: a tenth of all steps, at most 100).", _RATE, least=0)
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        option("NAME", "Learning rate after warmup: constant, or a cosine or linear decrease to 0.", _RATE),
    ] = "cosine"
    weight_decay: Annotated[
        float, option("X", "Weight decay of matrices; vectors, such as biases and norms, have none.", _RATE, min=0.0)
    ] = 0.01
    clip: Annotated[float, option("X", "Largest total norm of the gradients; 0: no clipping.", _RATE, min=0.0)] = 1.0
    seed: Annotated[int, _number("Random seed of initial weights, row order and dropout.", _RATE, least=0)] = 0
    eval_every: Annotated[int | None, _number("Steps between evaluations (default: only at the end).", _RATE)] = None
    check: Annotated[bool, _choice("Compare the pipeline with the original model before training.", _RATE)] = True

    def __post_init__(self) -> None:
        check_quantize(self.quantize, self.lora)
        if "none" not in (self.quantize, self.quantize_aware):
            raise UserError(
                f"--quantize {self.quantize} stores quantized weights, but --quantize-aware {self.quantize_aware} "
                "rounds unquantized weights in each step. Leave one of the two options out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of ``roundpipe train`` for checkpoints, logs and other files, and a time limit for stopped processes."""

    timeout: Annotated[
        float,
        option(
            "SECONDS",
            "With torchrun: seconds after which a stopped process (SIGSTOP) is killed, which ends the training.",
            _STEP,
            min=1.0,
        ),
    ] = 120.0
    checkpoint: Annotated[
        pathlib.Path | None, _path("Folder for checkpoints (default: <output>-checkpoints).", metavar="DIR")
    ] = None
    every: Annotated[int | None, _number("Steps between checkpoints (default: no regular checkpoints).", _FILES)] = None
    keep: Annotated[int, _number("Number of newest checkpoints to keep; older ones are removed.", _FILES)] = 3
    resume: Annotated[bool, _choice("Resume from the last checkpoint, if there is one.", _FILES, "--resume")] = False
    metrics: Annotated[pathlib.Path | None, _path("Write a JSON line to this file per step and evaluation.")] = None
    plot: Annotated[pathlib.Path | None, _path("Image of the losses to draw at the end: .png, .svg or .pdf.")] = None
    report_to: Annotated[
        list[str] | None,
        option("NAME", "Also log to tensorboard, wandb, mlflow or another integration of the Trainer.", _FILES),
    ] = None
    timeline: Annotated[pathlib.Path | None, _path("Record one step; `roundpipe timeline` draws the file.")] = None
    log_every: Annotated[int | None, _number("Steps per printed line (default: 5 % of all, up to 100).", _FILES)] = None
    overwrite: Annotated[bool, _choice("Replace the output folder and existing files.", _FILES, "--overwrite")] = False

    @property
    def writes_last(self) -> bool:
        return self.every is not None or self.checkpoint is not None or self.resume

    def checkpoints(self, output: pathlib.Path) -> pathlib.Path:
        return self.checkpoint or output.with_name(f"{output.name}-checkpoints")

    def check(self, output: pathlib.Path) -> None:
        """Raise an error, before the training, if a file exists or cannot be written."""
        check_output(output, overwrite=self.overwrite)
        if self.plot is not None:
            check_curve(self.plot)
        for name in ("metrics", "plot", "timeline"):
            path: pathlib.Path | None = getattr(self, name)
            if path is None:
                continue
            if path.is_dir() or (path.is_file() and not (self.overwrite or self.resume)):
                raise UserError(f"{path} exists. Name another file, or replace it: --overwrite")
            if not path.absolute().parent.is_dir():
                raise UserError(f"There is no folder {path.parent}, so {path.name} cannot be written")
            if path.is_file() or not path.exists():  # special files such as /dev/stdout are written directly
                check_place(path, f"--{name} FILE")
        checkpoints = self.checkpoints(output)
        check_place(checkpoints, "--checkpoint DIR", in_parent=False)
        if not self.resume and (there := list(checkpoints.glob("checkpoint-*"))):
            newest = max(there, key=lambda path: path.stat().st_mtime)
            raise UserError(
                f"The checkpoint {newest} belongs to another run. Continue that run: --resume; or start in another "
                "folder: --checkpoint DIR"
            )


def settings_of(
    step: StepOptions, learning: LearningOptions, replicas: int | None, report_to: list[str] | None = None
) -> Settings:
    # report_to: additional targets of the Trainer's logs
    names = {field.name for field in dataclasses.fields(Settings)}
    stated = {name: value for name, value in {**vars(step), **vars(learning)}.items() if name in names}
    stated |= {
        "replicas": replicas,
        "epochs": step.epochs or 1,
        "devices": _devices(step.devices, step.memory),
        "optim_dtype": dtype_named(step.optim_dtype),
        "keep_parameters": parse_gigabytes(step.keep_parameters, "--keep-parameters"),
        "report_to": tuple(report_to or ()),
    }
    return Settings(**stated)


def _devices(text: str, memory: str | None) -> list[Device]:
    names = own_devices() if text == "auto" else text if text.startswith("virtual") else text.split(",")
    try:
        found = parse_devices(names)
    except (ConfigError, DeviceError) as error:
        reason = "torch finds no accelerator here" if isinstance(error, DeviceError) else "it names no device"
        raise UserError(f"--devices {text}: {reason}. Write auto, virtual:2, or cuda:0,cuda:1") from error
    for device in found if memory is not None else ():
        if not isinstance(device, VirtualDevice):
            raise UserError(
                f"--memory limits virtual devices, but {device.name} has its own memory. Leave --memory out, or use "
                "virtual devices: --devices virtual:2"
            )
        device.memory_limit = parse_bytes(memory or "", "--memory")
    return found


def check_quantize(kind: str, lora: str | None) -> None:
    if kind != "none" and lora is None:
        raise UserError(f"--quantize {kind} freezes all weights, so nothing would train. Add adapters: --lora 8")


def check_host_option(host: str, update: str) -> None:
    try:
        disk_folder(host)
    except ConfigError as error:
        raise UserError(f"--host must be memory or disk:DIR, found {host!r}") from error
    if update != "masters" and host != HOST_IN_MEMORY:
        raise UserError(f"--update {update} needs all weights in memory. Leave --host {host} out")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the torch dtype of an option; ``None`` for ``auto`` and ``same``, which keep the dtype of the weights."""
    return None if name in ("auto", "same") else getattr(torch, name)


# All options of a command in a YAML file: ``--config FILE`` reads one, ``--print-config`` writes one.
_OWN = ("config", "print_config")  # not in the file, since they concern the file
_LARGEST = 2**20  # bytes


def read_config_file(context: typer.Context, path: pathlib.Path | None) -> pathlib.Path | None:
    """Use the values in a YAML file as defaults of the options; typer calls this function for ``--config``."""
    if path is None or context.resilient_parsing:
        return path
    require("yaml", purpose="--config", extra="train")
    import yaml  # type: ignore[import-untyped] # its types are a separate package

    try:
        text = read_text(path, failure=UserError, most=_LARGEST)
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error

    def refused(error: BaseException) -> UserError:
        return UserError(f"--config {path} is not YAML: {' '.join(str(error).split())[:200]}")

    with raised_as(refused, UserError):  # conversions to dates and numbers raise errors of Python
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            # a few aliases can expand to any number of values, or to a list that contains itself
            raise UserError(f"--config {path} contains a YAML alias (*name). Write the value itself.")
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise UserError(f"--config {path}: expected lines like `batch: 4`, found a {type(found).__name__}")
    parameters = {one.name: one for one in context.command.params if one.name not in (*_OWN, "help")}
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in parameters:
            meant = meant_option(name, [str(one).replace("_", "-") for one in parameters])
            raise UserError(f"{path}: there is no option {key}.{meant} All options: roundpipe train --print-config")
        if value is not None:  # null means the default
            takes_many = parameters[name].nargs == -1 or getattr(parameters[name], "multiple", False)
            typed = _as_typed(value, f"{path}: {key}")
            given[name] = [typed] if takes_many and not isinstance(typed, list) else typed
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _as_typed(value: object, place: str) -> Any:
    if isinstance(value, list):
        return [_as_typed(one, place) for one in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return str(value)
    raise UserError(f"{place} is a {type(value).__name__}. Write text, a number, true, false, or a list")


def format_config(concerns: Iterable[tuple[str, Any]]) -> str:
    lines: list[str] = []
    for heading, concern in concerns:
        lines.append(f"# {heading}")
        for field in dataclasses.fields(concern):
            value = getattr(concern, field.name)
            if field.name not in _OWN:
                shown = json.dumps(value, default=str, ensure_ascii=False)  # JSON values are valid YAML
                lines.append(f"{field.name.replace('_', '-')}: {shown}")
    return "\n".join(lines)


def source_of(name: str, *, weights: bool = True) -> ModelSource:
    """Find the model that a name on the command line means, without loading its weights."""
    # name: a folder with `config.json`, with or without weights; such a file, or a GGUF file; an id of the hub; or a
    # type such as `llama`, for a small one with random weights that reads bytes
    if pathlib.Path(name).exists():
        return model_source(name)
    found = find_model(name, weights=weights)
    if found.folder is not None:
        return dataclasses.replace(model_source(found.folder), name=name)
    config = found.config
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.02  # the usual standard deviation of random weights
    return ModelSource.of(config, name)


def read_by(source: ModelSource, tokenizer: Tokenizer) -> ModelSource:
    """Adapt a model with random weights to the vocabulary of its tokenizer; other models are unchanged."""
    is_of_type = not source.has_weights and source.folder is None and not pathlib.Path(source.name).exists()
    if not is_of_type or tokenizer.vocab_size == source.vocab_size:
        return source
    config = copy.deepcopy(source.config)
    part = config.get_text_config(decoder=True)
    part.vocab_size = tokenizer.vocab_size
    # the vocabulary is that of bytes, without a row for a padding token, which would never be trained
    part.pad_token_id = part.bos_token_id = None
    part.eos_token_id = tokenizer.eos_token_id
    return dataclasses.replace(source, config=config)


def row_length(source: ModelSource, length: int | None) -> int:
    """Return the number of tokens per row: ``length``, or by default the model's maximum, but at most 512."""
    longest = source.longest
    if length is not None and longest is not None and length > longest:
        raise UserError(f"{source.name} accepts rows of at most {longest} tokens. Use: --length {longest}")
    return length or min(512, longest or 512)
