"""From conversations to a chat in 4 bits: train in the integers that ship, export these integers, and ask the files.

    python examples/chat_in_4_bits.py
    python examples/chat_in_4_bits.py SmolLM2-135M-Instruct.gguf rows.jsonl

The model is a folder or a GGUF file, and a line of ``rows.jsonl`` holds ``{"messages": [...]}``. Without names, a Llama
of 29,000 random weights learns three answers in a minute. The folder ``chat-in-4-bits`` then runs in onnxruntime and
in a browser with transformers.js: ``examples/browser`` is a page for it.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from roundpipe_runtime.__main__ import main as roundpipe
from yobx_flatten.__main__ import main as yobx_flatten

ANSWERS = {"pipe": "holds a layer", "layer": "then another one", "one": "and again the pipe"}
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_small_model(folder: Path) -> None:
    """Write a Llama of random weights, with a token for each word of the answers."""
    words = sorted({word for pair in ANSWERS.items() for word in " ".join(pair).split()})
    names = {name: number for number, name in enumerate(["<unk>", "</s>", "<user>", "<assistant>", *words])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(names), max_position_embeddings=64, bos_token_id=1, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_small_rows(path: Path) -> None:
    """Write a conversation for each answer, eight times."""
    turns = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in ANSWERS.items()
    ]
    path.write_text("\n".join(map(json.dumps, turns * 8)), encoding="utf-8")


def run(command: str, *words: object) -> None:
    """Run a command as a terminal would, and stop where it fails."""
    print(f"\n$ {command} {' '.join(map(str, words))}", flush=True)
    status = (roundpipe if command == "roundpipe" else yobx_flatten)([*map(str, words)])
    if status:
        raise SystemExit(status)


def main(*names: str, steps: int = 40, folder: str | Path = ".") -> Path:
    """Train, export and ask; return the folder of the files."""
    out = Path(folder) / "chat-in-4-bits"
    with tempfile.TemporaryDirectory() as there:
        model, rows, trained = Path(there) / "model", Path(there) / "rows.jsonl", Path(there) / "trained"
        learning = ["--lr", "1e-2", "--length", "32"]
        if names:
            model, rows, learning = Path(names[0]), Path(names[1]), ["--lr", "1e-4", "--lora", "16"]
        else:
            write_small_model(model)
            write_small_rows(rows)
        sizes = ["--batch", "6", "--steps", steps, "--devices", "virtual:2"]
        run("roundpipe", "train", model, "--chat", rows, "-o", trained, "--quantize-aware", "int4", *learning, *sizes)
        first = json.loads(rows.read_text(encoding="utf-8").splitlines()[0])
        run("yobx-flatten", "export", trained, "-o", out, "--quantize", "keep", "--layout", "transformers.js")
    question = first["messages"][0]["content"]
    run("yobx-flatten", "chat", out, "--message", question, "--tokens", "40", "--greedy")
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
