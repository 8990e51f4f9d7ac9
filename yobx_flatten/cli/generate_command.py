"""``yobx-flatten generate``: generate text from an exported folder."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Any

import torch
import typer

from ..errors import DamagedFileError
from ..generate.sampling import Sampling
from ..model_folder.chat import chat_text, text_pieces
from ..model_folder.generators import open_generator
from ..model_folder.source.find import require_transformers
from ..model_folder.source.tokenizer_files import open_tokenizer, readable
from ..terminal.output import say, say_json
from ..terminal.running import UserError
from .options import AdapterName, Device, Folder, Runtime, Seed, Temperature, Threads, TopK, TopP, Trust


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

    A single prompt is printed while its text is generated. Several prompts, and the results of a beam search, are
    printed at the end.
    """
    sampling = Sampling(do_sample=sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = open_generator(folder, runtime=runtime, threads=threads, trust=trust, device=device)
    generator = opened.with_adapter(adapter)
    tokenizer = _tokenizer(folder)
    texts_in = [chat_text(tokenizer, folder, one) for one in prompt] if chat else prompt
    options: dict[str, Any] = {"add_special_tokens": False} if chat else {}  # the chat template adds special tokens
    with readable(folder, UserError):
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
    _finish(prompt, texts, len(made), seconds, json=json, streamed=streamed)
    return 0


def _finish(prompts: list[str], texts: list[str], steps: int, seconds: float, *, json: bool, streamed: bool) -> None:
    if json:
        rows: list[Any] = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        say_json({"rows": rows, "steps": steps, "seconds": seconds})
    elif streamed:
        say()
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            say(f"{prompt!r}\n  {text!r}")


def _tokenizer(folder: pathlib.Path) -> Any:
    require_transformers("generate, to read and write text,")
    try:
        tokenizer = open_tokenizer(folder, failure=DamagedFileError, padding_side="left")
    except (DamagedFileError, OSError) as error:
        raise UserError(
            f"{folder} contains no tokenizer that can be read: copy the model's tokenizer files there"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
