"""The commands that write or take an exported folder: ``export``, ``verify``, ``adapter``, ``generate``, ``chat``."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
import typer

from ..core.terminal.command_line import CHECK_FAILED, REFUSED, UserError, progress, say, say_json
from ..errors import DamagedFileError
from ..export.quantization import Quantization
from ..generate.sampling import Sampling
from ..generate.settings import MANIFEST
from ..model_folder.folder_and_model import add_adapter, explain_folder
from ..model_folder.open_folder import open_generator
from ..model_folder.pieces.tasks import TASKS
from ..model_folder.source import find
from ..model_folder.texts import chat_text, chat_tokenizer, message_tokens, text_pieces
from ..model_folder.verify import verify_folder
from ..model_folder.write import ExportedFolder, check_target, export_folder
from ..verify.verify_file import verify_file

# tasks for which `yobx-flatten generate` runs the folder
_WRITES = ("text-generation", "text2text-generation", "image-text-to-text")

_RuntimeName = Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"]

Folder = Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A folder that `yobx-flatten export` wrote.")]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", metavar="NAME", help="Name of a LoRA adapter in the folder (default: none).")
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; below 1, likely tokens become likelier.")]
TopK = Annotated[int | None, typer.Option(help="Sample among this number of likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens with this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of sampling.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads of onnxruntime, OpenVINO or ExecuTorch.")]
Runtime = Annotated[
    _RuntimeName | None,
    typer.Option(help="Runtime (default: the one the folder was exported for). openvino also runs ONNX files."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Load files that may run code (AOTInductor, pickles); use only if you trust their author."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Device on which onnxruntime runs: cpu, cuda, cuda:1, directml, coreml, openvino ...")
]


def export(
    model: Model,
    output: Output,
    target: Target = None,
    task: Task = "auto",
    to: To = "onnx",
    dtype: Dtype = "float32",
    opset: Opset = None,
    dynamic: Dynamic = "all",
    batch: Batch = 1,
    max_batch: MaxBatch = 4,
    max_length: MaxLength = None,
    proof: Proof = "auto",
    quantize: Quantize = None,
    perplexity_ratio: PerplexityRatio = None,
    activations: Activations = "auto",
    calibration: Calibration = None,
    optimize: Optimize = None,
    logits: Logits = "all",
    weights: Weights = "auto",
    unmatched_weights: UnmatchedWeights = "refuse",
    trust_remote_code: TrustRemoteCode = False,
    word_times: WordTimes = False,
    layout: Layout = "flat",
    adapter: Adapters = None,
    room_for_adapters: RoomForAdapters = False,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> int:
    """Export a Hugging Face model to a folder of files that generate text, and compare the files with the model.

    The files have the names and inputs that generation tools expect. The outputs of each file are compared with the
    model's outputs, and 40 tokens that the files generate are compared with those of model.generate. For models
    with 1 GB of weights or more, 8 tokens are compared. --proof changes the number of checks. DIR is created only if
    all checks pass. Exit status: 0 all checks passed; 1 a file differs from the model.
    """
    quantization = None
    if quantize is not None:
        quantization = Quantization(quantize, perplexity_ratio=perplexity_ratio, activations=activations)
    elif perplexity_ratio is not None:
        raise UserError("--perplexity-ratio is for quantised weights. Add --quantize int8 or --quantize int4.")
    elif activations != "auto":
        raise UserError(
            "--activations is for quantised weights. Add --quantize keep, --quantize int8 or --quantize int4."
        )
    adapters = named_folders(adapter) if adapter else {} if room_for_adapters else None
    if adapter and room_for_adapters:
        raise UserError("--adapter and --room-for-adapters cannot be combined: pass one of the two options.")
    check_target(output, overwrite)
    with progress(f"loading {model}"):
        found = find.find_model(model, trust_remote_code=trust_remote_code)
        done = export_folder(
            found,
            output,
            task=task,
            to=to,
            opset_version=opset,
            batch=None if dynamic == "all" else batch,
            overwrite=overwrite,
            proof=proof,
            quantize=quantization,
            calibration=calibration,
            optimize=optimize,
            logits=logits,
            target=target,
            bounds=None if max_length is None else {"batch": max_batch, "length": max_length},
            dtype=dtype,
            weights=weights,
            unmatched_weights=unmatched_weights,
            layout=layout,
            word_times=word_times,
            adapters=adapters,
        )
    if json:
        say_json(_exported_as_dict(done, found))
        return 0
    if not found.has_weights:
        say(f"{found}\n")
    say(f"{done}\nCPU time: {time.process_time():.0f} s")
    following = f'\n       yobx-flatten generate {output} --prompt "..."' if done.task in _WRITES else ""
    say(f"\nNext:  yobx-flatten verify {output}{following}")
    return 0


def _exported_as_dict(done: ExportedFolder, found: find.FoundModel) -> dict[str, object]:
    return {
        "path": str(done.path),
        "model": found.name,
        "random_weights": not found.has_weights,
        "task": done.task,
        "files": {
            name: {
                "max_difference": report.max_difference,
                "inputs": report.input_names,
                "outputs": report.output_names,
                "bytes": report.onnx_bytes or report.file_bytes,
                "planned_bytes": report.planned_bytes,
                "remarks": report.remarks,
                "proof": report.proof,
                "seconds": report.seconds,
                "processor_seconds": report.processor_seconds,
                "peak_growth": report.peak_growth,
                "quality": None if report.quality is None else report.quality.as_dict(),
            }
            for name, report in done.reports.items()
        },
        "checks": [dataclasses.asdict(check) for check in done.verified.checks],
    }


def verify(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(metavar="PATH", help="An exported folder; with --model, any model file or folder."),
    ],
    trust: Trust = False,
    device: Device = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also export this model again; show the first node whose values differ."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare the files, from any exporter, with this model.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="THEIRS=OURS", help="With --model: pair the names of an input or output (repeatable)."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check an exported folder: run its files, generate tokens, and compare with the model's stored results.

    The folder contains the inputs and the results, so the model is not loaded. Exit status: 0 all results agree; 1 a
    result differs. With --explain, the model is exported again, and the first node whose values differ is shown.

    With --model, check files from any exporter. Files and model run on the same inputs: several sizes, padding, texts
    longer than the attention window, and a decoding loop with the file's KV cache. Exit status with --model: 0 all
    files agree with the model; 1 a file differs; 2 a file cannot be compared, or fails on all inputs.
    """
    if model is not None:
        if device is not None or explain is not None:
            raise UserError("--device and --explain are for exported folders, and do not work with --model.")
        strange = next((pair for pair in names or [] if "=" not in pair), None)
        if strange is not None:
            raise UserError(
                f"--map takes NAME_IN_THE_FILE=NAME_IN_THE_MODEL, as in --map ids=input_ids, found {strange}"
            )
        renamed = dict(pair.split("=", 1) for pair in names or [])
        with progress(f"reading {folder}") as show:
            found = verify_file(folder, model, names=renamed, trust=trust, on_file=show)
        say_json(found.as_dict()) if json else say(str(found))
        return {True: 0, False: CHECK_FAILED, None: REFUSED}[found.ok]
    if names or (folder.exists() and not (folder / MANIFEST).exists()):
        why = "--map works only with --model" if names else f"{folder}: yobx-flatten export did not write it"
        raise UserError(f"{why}. Name the model:\n    yobx-flatten verify {folder} --model MODEL")
    with progress(f"reading {folder}") as show:
        report = verify_folder(folder, on_check=show, trust=trust, device=device)
        explained = None if explain is None else explain_folder(folder, explain)
    if json:
        checks = [dataclasses.asdict(check) for check in report.checks]
        shown: dict[str, object] = {"path": str(folder), "ok": report.ok, "checks": checks}
        if explained is not None:
            compared = explained.files.items()
            shown["explained"] = [
                {"file": file, "case": case, **dataclasses.asdict(one)} for (file, case), one in compared
            ]
        say_json(shown)
    else:
        say(str(report))
        if explained is not None:
            say(f"\n{explained}")
    return 0 if report.ok and (explained is None or explained.ok) else CHECK_FAILED


def adapter(
    folder: Folder,
    added: Annotated[list[str], typer.Argument(metavar="NAME=FOLDER", help="One or more PEFT adapters.")],
    model: Annotated[
        str | None, typer.Option(help="Model that DIR was exported from (default: the adapter's base model).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace adapters of the same name.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Add LoRA adapters to an exported folder, and compare the outputs of the files with those of PEFT.

    DIR must have been exported with --adapter or --room-for-adapters. The original model is loaded for the comparison.
    Exit status: 0 all checks passed; 1 the files differ from PEFT, and nothing was written.
    """
    found = []
    for name, place in named_folders(added).items():
        with progress(f"adding {name}"):
            found.append(add_adapter(folder, name, place, model=model, overwrite=overwrite))
    if json:
        say_json([{"name": one.name, "checks": [dataclasses.asdict(check) for check in one.checks]} for one in found])
    else:
        say("\n".join(map(str, found)))
        say(f'\nNext:  yobx-flatten generate {folder} --adapter {found[0].name} --prompt "..."')
    return 0


def named_folders(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, equals, place = one.partition("=")
        if not equals or not name or not place or name in found:
            raise UserError(f"expected each adapter as NAME=FOLDER, with a different name for each; found {one}")
        found[name] = place
    return found


def generate(
    folder: Folder,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; several texts form a batch.")],
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 40,
    sample: Annotated[bool, typer.Option("--sample", help="Sample tokens instead of taking the likeliest.")] = False,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    beams: Annotated[
        int, typer.Option(min=1, help="Number of beams of a beam search, whose result is printed at the end.")
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Format each prompt as a message with the tokenizer's chat template.")
    ] = False,
    threads: Threads = None,
    runtime: Runtime = None,
    trust: Trust = False,
    device: Device = None,
    adapter: AdapterName = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, at the end.")] = False,
) -> int:
    """Generate text with the model of an exported folder, token by token.

    The text for a single prompt is printed while it is generated. The texts for several prompts, and the result of a
    beam search, are printed at the end.
    """
    sampling = Sampling(do_sample=sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = open_generator(folder, runtime=runtime, threads=threads, trust=trust, device=device)
    generator = opened.with_adapter(adapter)
    tokenizer = _tokenizer(folder)
    texts_in = [chat_text(tokenizer, folder, one) for one in prompt] if chat else prompt
    options: dict[str, Any] = {"add_special_tokens": False} if chat else {}  # the chat template adds special tokens
    with find.readable(folder, UserError):
        given = tokenizer(texts_in, return_tensors="pt", padding=len(prompt) > 1, **options)
    if given["input_ids"].shape[-1] == 0:
        raise UserError("the prompt has no tokens: pass --prompt TEXT")
    encoder_decoder = generator.parts.encoder is not None
    streamed = len(prompt) == 1 and not json and beams == 1
    start = time.perf_counter()
    made: list[torch.Tensor] = []
    if streamed and not encoder_decoder and not chat:
        say(prompt[0], end="", is_result=True)
    inputs = given["input_ids"].long(), given["attention_mask"].long()
    if beams > 1:
        found = generator.generate(*inputs, max_new_tokens=tokens, sampling=sampling, num_beams=beams)
        made = list(found[:, 1 if encoder_decoder else inputs[0].shape[1] :].T)
    else:
        new = generator.stream(*inputs, max_new_tokens=tokens, sampling=sampling)
        if streamed:
            for piece in text_pieces(tokenizer, new, made):
                say(piece, end="", is_result=True)
        else:
            made.extend(new)
    seconds = time.perf_counter() - start
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in torch.stack(made, 1)]
    if json:
        rows = [{"prompt": asked, "text": text} for asked, text in zip(prompt, texts, strict=True)]
        say_json({"rows": rows, "steps": len(made), "seconds": seconds})
    elif streamed:
        say()
    else:
        for asked, text in zip(prompt, texts, strict=True):
            say(f"{asked!r}\n  {text!r}")
    return 0


def _tokenizer(folder: pathlib.Path) -> Any:
    find.require_transformers("generate, to read and write text,")
    try:
        tokenizer = find.open_tokenizer(folder, failure=DamagedFileError, padding_side="left")
    except (DamagedFileError, OSError) as error:
        raise UserError(
            f"{folder} contains no tokenizer that can be read: copy the model's tokenizer files into the folder"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def chat(
    folder: Folder,
    message: Annotated[
        list[str] | None, typer.Option(help="A message to send, one option per turn (default: lines of stdin).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens per reply.")] = 256,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Sample or not (default: as in generation_config.json).")
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    runtime: Runtime = None,
    trust: Trust = False,
    device: Device = None,
    adapter: AdapterName = None,
    json: Annotated[bool, typer.Option("--json", help="Print the conversation as JSON, at the end.")] = False,
) -> int:
    """Chat with the model of an exported folder, one message per line; replies are printed as they are generated.

    The prompt for each reply is the whole conversation, formatted by the tokenizer's chat template. An empty line, or
    the end of the input, ends the conversation.
    """
    find.require_transformers("chat, to read and write text,")
    opened = open_generator(folder, runtime=runtime, threads=threads, trust=trust, device=device)
    generator = opened.with_adapter(adapter)
    if generator.parts.encoder is not None:
        raise UserError(
            f"{folder} has no chat template. To continue a text: yobx-flatten generate {folder} --prompt TEXT"
        )
    tokenizer = chat_tokenizer(folder)
    draws = sample or (sample is None and (temperature != 1.0 or (top_k, top_p, seed) != (None, None, None)))
    sampling = None if sample is None else Sampling()  # None: as in generation_config.json
    if draws:
        sampling = Sampling(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    start, count = time.perf_counter(), 0
    for turn in _turns(message, quiet=json):
        messages.append({"role": "user", "content": turn})
        made: list[torch.Tensor] = []
        prompt = message_tokens(tokenizer, messages)
        new = generator.stream(prompt["input_ids"], prompt["attention_mask"], max_new_tokens=tokens, sampling=sampling)
        text = ""
        for piece in text_pieces(tokenizer, new, made):
            text += piece
            if not json:
                say(piece, end="", is_result=True)
        if not json:
            say()
        count += len(made)
        messages.append({"role": "assistant", "content": text})
    if json:
        say_json({"messages": messages, "tokens": count, "seconds": time.perf_counter() - start})
    return 0


def _turns(given: list[str] | None, *, quiet: bool) -> Iterator[str]:
    if given:
        yield from given
        return
    while True:
        if sys.stdin.isatty() and not quiet:
            say("> ", end="")
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.rstrip("\n")


# the arguments and options of `export`
Model = Annotated[str, typer.Argument(metavar="MODEL", help=find.MODEL_NAMES + " To merge a PEFT adapter: its folder.")]
Output = Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")]
Target = Annotated[
    _RuntimeName | None,
    typer.Option(help="Runtime that will run the files (default: onnxruntime; torch with --to program)."),
]
Task = Annotated[str, typer.Option(metavar="TASK", help=f"Task of the model, one of {', '.join(('auto', *TASKS))}.")]
To = Annotated[Literal["onnx", "program"], typer.Option(help="Write ONNX files or torch.export programs.")]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"],
    typer.Option(help="Data type of the weights. bfloat16 needs --to program or --proof none."),
]
Opset = Annotated[int | None, typer.Option(min=18, help="ONNX opset (default: that of the fastest correct file).")]
Dynamic = Annotated[Literal["all", "length"], typer.Option(help="Sizes that vary: batch and lengths, or only lengths.")]
Batch = Annotated[int, typer.Option(min=1, help="Fixed batch size of the files, if you pass `--dynamic length`.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="With --max-length: largest batch size that the files accept.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Largest number of tokens that the files accept; ExecuTorch requires it.")
]
Proof = Annotated[
    Literal["auto", "full", "standard", "sample", "none"],
    typer.Option(help="How much is checked. auto: full below 100 MB of weights, standard below 1 GB, sample above."),
]
Quantize = Annotated[
    Literal["int8", "int4", "keep"] | None,
    typer.Option(
        help="Quantize linear layers to 8 or 4 bits, and compare logits, greedy tokens and perplexity with the "
        "model's. keep: store the integers of a model that is quantized already."
    ),
]
PerplexityRatio = Annotated[
    float | None,
    typer.Option(help="With --quantize: largest ratio of perplexities, file / model (default: int4 1.1, others 1.01)."),
]
Activations = Annotated[
    Literal["auto", "float", "int8", "split", "token"],
    typer.Option(
        help="With --quantize: precision of activations. `int8` and `split` are faster than `float`; `split` "
        "multiplies large values separately. `token` (int8 with one scale per token) is fastest for encoders."
    ),
]
Calibration = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="With --quantize: file with one prompt per line, for calibration and checks."),
]
Optimize = Annotated[
    Literal["onnxruntime"] | None,
    typer.Option(help="Use onnxruntime's fused attention, which updates cached keys and values in place."),
]
Logits = Annotated[
    Literal["all", "last"],
    typer.Option(help="Files return the logits of all tokens, or only of the last token, which is enough to generate."),
]
Weights = Annotated[
    Literal["auto", "memory", "stream"],
    typer.Option(help="Load all weights at once (memory), or each layer when it runs (stream). auto: by free memory."),
]
UnmatchedWeights = Annotated[
    Literal["refuse", "unused", "random"],
    typer.Option(help="If weights do not match the model: fail, ignore extra ones, or also make missing ones random."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python files of MODEL (auto_map); use only if you trust their author."
    ),
]
WordTimes = Annotated[
    bool,
    typer.Option("--word-times", help="Whisper: also return the attention weights from which word times are computed."),
]
Layout = Annotated[
    Literal["flat", "transformers.js", "genai"],
    typer.Option(
        help="Names of the files. transformers.js: names that this library expects (onnx/model_q4.onnx). genai: files "
        "and configuration that onnxruntime-genai needs for Whisper and for models that read images."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="LoRA adapter to include; `yobx-flatten generate --adapter NAME` uses the adapter. May be repeated.",
    ),
]
RoomForAdapters = Annotated[
    bool, typer.Option("--room-for-adapters", help="Add inputs for LoRA matrices, so that adapters can be added later.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the contents of DIR.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
