"""The options of ``roundpipe train``, with their help, in the order in which it shows them."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, Literal

import typer

from yobx_flatten.model_folder.source import MODEL_NAMES
from yobx_flatten.terminal.failures import UserError

_TEXT, _STEP, _RATE, _FILES = "Text", "A step", "Learning", "What is written"


def _number(text: str, panel: str, *, least: int = 1) -> Any:
    return typer.Option(min=least, metavar="N", help=text, rich_help_panel=panel)


def _path(text: str, *, metavar: str = "FILE") -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=_FILES)


def _model_is_named(context: typer.Context, words: list[str] | None) -> list[str] | None:
    if not words and not context.params.get("model") and not context.resilient_parsing:
        raise UserError("Missing argument 'MODEL' (see --help)")
    return words


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL [FILES]...",
        help=MODEL_NAMES + " After it, more text, as a shell makes of --text *.txt.",
        callback=_model_is_named,
    ),
]
Model = Annotated[
    str | None,
    # looked at first: where it is given, no argument is the model
    typer.Option(metavar="MODEL", help="The model, if it is not the first argument.", is_eager=True),
]
Output = Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the trained model.")]
Text = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILES",
        help="A file of text or of JSON lines, a folder of such, a folder of the library datasets, or a pattern.",
        rich_help_panel=_TEXT,
    ),
]
Field = Annotated[
    str,
    typer.Option(metavar="NAME", help="Field of JSON lines and datasets that holds the text.", rich_help_panel=_TEXT),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A folder with one, or the word bytes. By default the model's own; bytes where weights are random and "
        "there is none.",
        rich_help_panel=_TEXT,
    ),
]
Length = Annotated[int | None, _number("Tokens of a row; 512, or what the model takes.", _TEXT, least=2)]
EvalShare = Annotated[
    float,
    typer.Option(min=0.0, max=0.9, metavar="X", help="Share of the rows that is held out.", rich_help_panel=_TEXT),
]

Devices = Annotated[
    str,
    typer.Option(metavar="DEVICES", help="auto, virtual:N (made of the CPU), or cuda:0,cuda:1.", rich_help_panel=_STEP),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most memory of each virtual device, like 2GiB.", rich_help_panel=_STEP),
]
Batch = Annotated[int, _number("Rows of a batch, of all processes.", _STEP)]
Microbatches = Annotated[int | None, _number("Parts of a batch, or a group; devices + 1 by default.", _STEP)]
Replicas = Annotated[int | None, _number("Groups of a batch; by default one per process.", _STEP)]
Accumulate = Annotated[int, _number("Batches of a step.", _STEP)]
Steps = Annotated[int | None, _number("Number of steps, instead of --epochs.", _STEP)]
Epochs = Annotated[int | None, _number("Passes over the text; one by default.", _STEP)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Type of the weights; auto: as they are stored.", rich_help_panel=_STEP),
]
UnmatchedWeights = Annotated[
    Literal["refuse", "unused", "random"],
    typer.Option(
        help="Weights that the folder has and the model not: left out; or lacks: random. refuse: an error.",
        rich_help_panel=_STEP,
    ),
]
OptimDtype = Annotated[
    Literal["float32", "bfloat16", "same"],
    typer.Option(help="Type of what AdamW works on; same: that of the weights.", rich_help_panel=_STEP),
]

KeepParameters = Annotated[
    str,
    typer.Option(
        metavar="GB",
        help="Parameters that stay on each device from step to step, or auto: as many as there is room for.",
        rich_help_panel=_STEP,
    ),
]

LoraText = Annotated[
    str | None,
    typer.Option(
        metavar="R[,ALPHA[,NAMES]]",
        help="Learn adapters of rank R only: 8, or 8,16, or 8,16,q_proj,v_proj.",
        rich_help_panel=_RATE,
    ),
]
Rate = Annotated[float, typer.Option(metavar="X", help="Learning rate, the highest.", rich_help_panel=_RATE)]
Warmup = Annotated[
    int | None, _number("Steps until --lr is reached; by default a tenth of all, 100 at most.", _RATE, least=0)
]
Schedule = Annotated[
    Literal["cosine", "linear", "constant"],
    typer.Option(metavar="NAME", help="Fall of the rate after that: cosine, linear, constant.", rich_help_panel=_RATE),
]
WeightDecay = Annotated[
    float,
    typer.Option(min=0.0, metavar="X", help="Weight decay, for weights of two axes or more.", rich_help_panel=_RATE),
]
Clip = Annotated[
    float, typer.Option(min=0.0, metavar="X", help="Largest norm of the gradients; 0: any.", rich_help_panel=_RATE)
]
Seed = Annotated[int, _number("Seed of random weights, the order of rows, and dropout.", _RATE, least=0)]
EvalEvery = Annotated[int | None, _number("Steps between evaluations; one at the end by default.", _RATE)]
Check = Annotated[bool, typer.Option(help="Compare the cut model with the plain one before.", rich_help_panel=_RATE)]

CheckpointFolder = Annotated[
    pathlib.Path | None, _path("Folder for checkpoints; by default <output>-checkpoints.", metavar="DIR")
]
Every = Annotated[int | None, _number("Steps between checkpoints; by default Ctrl-C alone writes one.", _FILES)]
Keep = Annotated[int, _number("How many checkpoints stay.", _FILES)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.", rich_help_panel=_FILES)
]
Metrics = Annotated[pathlib.Path | None, _path("A line of JSON per step and evaluation.")]
TimelineFile = Annotated[pathlib.Path | None, _path("Who computed what when, in one of the first steps.")]
LogEvery = Annotated[int | None, _number("Steps between lines, where there is no terminal.", _FILES)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON at the end, all else on stderr.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.", rich_help_panel=_FILES)]
