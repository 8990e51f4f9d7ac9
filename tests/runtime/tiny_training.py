"""What a training takes, small: a configuration, folders of models and tokenizers, rows of tokens, a plain loop."""

import json
import math
import os
import pathlib
import signal

import torch
from torch import nn

from roundpipe_runtime.fine_tune import Blocks, ModelSource, Settings, StepRecord, Training, make_blocks, run
from roundpipe_runtime.fine_tune.trainer import Order

# A chat template, and the same one with marks around answers.
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT_WITH_MARKS = (
    "{% for message in messages %}<{{ message['role'] }}> {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }} </s>{% endgeneration %} {% else %}{{ message['content'] }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

WORDS = ["the", "pipe", "holds", "a", "layer", "and", "then", "another", "one", "again"]


def config(**options):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": 259, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **options})


def source(**options) -> ModelSource:
    return ModelSource.of(config(**options), "tiny")


def prose(words: int = 600, seed: int = 0) -> str:
    """Sentences of a few words, in an order that has something to learn."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    return " ".join(WORDS[number] + ("." if place % 7 == 6 else "") for place, number in enumerate(numbers)) + "\n"


def blocks(length: int = 16, rows: int = 60, eval_share: float = 0.1) -> Blocks:
    """Rows of bytes, as the byte tokenizer numbers them."""
    data = prose(rows * length).encode()[: rows * length]
    return make_blocks(
        torch.tensor([byte + 3 for byte in data], dtype=torch.int32), length=length, eval_share=eval_share
    )


def text_folder(path: pathlib.Path, files: int = 3) -> pathlib.Path:
    path.mkdir(parents=True)
    for number in range(files):
        (path / f"{number}.txt").write_text(prose(seed=number), encoding="utf-8")
    return path


def config_folder(path: pathlib.Path, **options) -> pathlib.Path:
    config(**options).save_pretrained(path)
    return path


def weights_folder(path: pathlib.Path, *, tokenizer: bool = True, dtype: torch.dtype = torch.float32) -> pathlib.Path:
    """A folder as ``save_pretrained`` writes it, with a tokenizer of words."""
    source(vocab_size=40).load(seed=5).to(dtype).save_pretrained(path)
    if tokenizer:
        word_tokenizer().save_pretrained(path)
    return path


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "</s>", ".", *WORDS]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def chat_tokenizer(template: str | None = CHAT):
    """The words of :func:`word_tokenizer`, and two tokens for roles."""
    made = word_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"], "pad_token": "</s>"})
    made.chat_template = template
    return made


def train_plainly(model: nn.Module, made: Blocks, settings: Settings) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step, as a script for transformers alone computes them."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr)
    steps, warmup = settings.steps, settings.warmup
    order = Order(made.training, seed=settings.seed)
    found = []
    for step in range(steps):
        size = settings.batch * settings.accumulate
        ids = made.tokens[[order[place] for place in range(step * size, (step + 1) * size)]].long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        falling = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * ((step + 1) / warmup if step < warmup else falling)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def records_of(training: Training, *, stop: int | None = None, **options) -> list:
    """Records of a training that runs to its end, or gets Ctrl-C after a step."""
    found = []

    def show(record):
        found.append(record)
        if isinstance(record, StepRecord) and record.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    run(training, show=show, **options)
    return found


def same_bits(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def metrics_of(path: pathlib.Path) -> list[tuple[int, str, float]]:
    """What of a metrics file is the same in every run: steps and losses."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], "loss" if "loss" in row else "eval", row.get("loss", row.get("eval_loss"))) for row in rows]
