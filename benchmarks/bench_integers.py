"""What a file in 4 bits keeps of the model that was trained: rounded in each step, after the training, and QLoRA.

    python benchmarks/bench_integers.py [--model FOLDER] [--ways aware float qlora] [--steps N] [--json FILE]

Each way trains LoRA adapters on the same conversations (paragraphs of Python's own help) from the same weights, and
exports the result to int4 with `yobx-flatten export`. The table shows the loss on held-out rows of the trained model in
PyTorch and of the file in onnxruntime, and two counts of greedy tokens of ten answers: where the file is given the
trained model's tokens, and where the file continues its own. Without `--model`, a small Llama learns three answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import peft
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from examples.chat_in_4_bits import write_small_model, write_small_rows
from roundpipe_runtime.__main__ import main as roundpipe
from roundpipe_runtime.fine_tune import load_tokenizer, model_source, read_chats
from yobx_flatten import open_model
from yobx_flatten.__main__ import main as yobx_flatten
from yobx_flatten.model_folder.source.find import find_model

WAYS = {"aware": ["--quantize-aware", "int4"], "float": [], "qlora": ["--quantize", "nf4"]}
NEW = 50  # tokens of an answer


def write_rows(path: Path) -> None:
    """Write a question and an answer for each topic of Python's help."""
    rows = []
    for name in sorted(topics)[:70]:
        paragraphs = topics[name].split("\n\n")
        answer = " ".join(paragraphs[2 if len(paragraphs) > 2 else 0].split())[:260]
        question = f"What does Python's help say about {name}?"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows), encoding="utf-8")


def run(command: Any, words: list[object]) -> None:
    """Run a command in this process, and stop where it fails."""
    if status := command([*map(str, words)]):
        raise SystemExit(status)


def trained_model(way: str, model: Path, out: Path) -> nn.Module:
    """Return the trained model in PyTorch."""
    if way == "aware":
        return find_model(str(out)).load().eval()
    base = model_source(str(model)).load(dtype=torch.float32, quantize="nf4" if way == "qlora" else None)
    return peft.PeftModel.from_pretrained(base, out).eval()


@torch.no_grad()
def measure(way: str, model: Path, rows: Path, work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Train, export and compare one way."""
    out, file = work / way, work / f"{way}-file"
    how = ["--length", asked.length, "--batch", 2, "--steps", asked.steps, "--lr", "5e-4", "--lora", 8, "--no-check"]
    how += ["--devices", "virtual:1", "--microbatches", 1, "--dtype", "float32", "--eval-share", 0.2, "--show-rows", 0]
    with torch.enable_grad():
        run(roundpipe, ["train", model, "--chat", rows, "-o", out, *how, *WAYS[way]])
    quantize = "keep" if way == "aware" else "int4"
    run(yobx_flatten, ["export", out, "-o", file, "--quantize", quantize, "--perplexity-ratio", 1.5])
    tokenizer = load_tokenizer(model_source(str(model)))
    data = read_chats([str(rows)], tokenizer, length=asked.length, eval_share=0.2, seed=0)
    eager, opened, held = trained_model(way, model, out), open_model(file), data.held_out.tolist()

    def loss(called: Any) -> float:
        total, count = 0.0, 0
        for row in held:
            labels = data.labels[row].long()[1:]
            scores = called(input_ids=data.ids[row].long()[None]).logits[0, :-1].float()
            total += nn.functional.cross_entropy(scores, labels, ignore_index=-100, reduction="sum").item()
            count += int((labels != -100).sum())
        return total / count

    fed = alone = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    for row in held[:10]:
        prompt = data.ids[row].long()[: int((data.labels[row] != -100).int().argmax())][None]
        given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **options}
        text, own = eager.generate(**given), torch.as_tensor(opened.generate(**given))
        answer = text[0, prompt.shape[1] :]
        fed += int((opened(input_ids=text).logits[0, prompt.shape[1] - 1 : -1].argmax(-1) == answer).sum())
        alone += int((own[0, prompt.shape[1] :] == answer).sum())
    size = sum(path.stat().st_size for path in file.glob("*.onnx*")) / 1e6
    found = {"loss_trained": loss(eager), "loss_file": loss(opened), "fed": fed, "alone": alone, "megabytes": size}
    return {**found, "tokens": NEW * len(held[:10])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model with a chat template")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["aware", "float"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model, rows = asked.model or work / "model", work / "rows.jsonl"
        (write_rows if asked.model else write_small_rows)(rows)
        if asked.model is None:
            write_small_model(model)
            asked.length = 16
        found = {way: measure(way, model, rows, work, asked) for way in asked.ways}
    print(f"{'way':6} {'loss, trained':>14} {'loss, file':>11} {'tokens given':>13} {'own tokens':>11} {'MB':>7}")
    for way, row in found.items():
        counts = f"{row['fed']:>6} of {row['tokens']:<3} {row['alone']:>4} of {row['tokens']:<3}"
        print(f"{way:6} {row['loss_trained']:>14.3f} {row['loss_file']:>11.3f} {counts} {row['megabytes']:>7.1f}")
    if asked.json is not None:
        versions = {name: version(name) for name in ("torch", "transformers", "peft", "onnxruntime")}
        data = {
            "machine": machine(),
            "model": str(asked.model),
            "steps": asked.steps,
            "versions": versions,
            "ways": found,
        }
        asked.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
