"""``yobx-flatten chat``: talk to an exported folder in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from ..generate.sampling import Sampling
from ..model_folder.chat import chat_tokenizer, message_tokens, text_pieces
from ..model_folder.generators import open_generator
from ..model_folder.source.find import require_transformers
from ..terminal.output import say, say_json
from ..terminal.running import UserError
from .options import AdapterName, Device, Folder, Runtime, Seed, Temperature, Threads, TopK, TopP, Trust


def chat(
    folder: Folder,
    message: Annotated[
        list[str] | None, typer.Option(help="A message to send; one option per turn (default: lines of stdin).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens per reply.")] = 256,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Sample tokens (default: as in generation_config.json).")
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
    """Talk to an exported folder, one turn per line; replies appear as they are generated.

    The tokenizer's chat template formats all previous turns as the prompt. An empty line, or the end of the input, ends
    the conversation.
    """
    require_transformers("chat, to read and write text,")
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
