"""The doors that files of strangers come through: what writes a file, what reads it, and what may be changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch

import roundpipe_runtime as rp
import yobx_flatten as yf
from tests.runtime import tiny_training as tiny
from yobx_flatten.errors import FlattenError

__all__ = ["DOORS", "Door"]


def _nothing(folder: pathlib.Path) -> None:
    """No digest to make right."""


@dataclasses.dataclass(frozen=True)
class Door:
    """A kind of file."""

    write: Callable[[pathlib.Path], object]
    read: Callable[[pathlib.Path], object]
    files: tuple[str, ...]
    repair: Callable[[pathlib.Path], None] = _nothing
    share: int = 1


def _values() -> dict[str, Any]:
    """Nested values of all kinds that transformers, dataclasses and Python have."""
    from transformers import LlamaConfig

    cache = yf.make_dynamic_cache([(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4))] * 2)
    return {
        "ids": torch.arange(6).reshape(2, 3),
        "cache": cache,
        "more": [(torch.rand(2).bfloat16(), None, 1.5, "text", torch.float16), {3: torch.tensor(True)}],
        "config": LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    }


def _llama() -> Any:
    from yobx_flatten.model_folder.source.configuration import small_model

    return small_model("llama")


def _write_nested(folder: pathlib.Path) -> None:
    with yf.register_flattening_functions(patch_transformers=True):
        yf.save_nested(folder / "values.onnx", _values())


def _read_nested(folder: pathlib.Path) -> None:
    with yf.register_flattening_functions(patch_transformers=True):
        yf.load_nested(folder / "values.onnx")


def _write_case(folder: pathlib.Path) -> None:
    with yf.register_flattening_functions(patch_transformers=True):
        yf.save_case(folder / "case.onnx", _values(), {"logits": torch.rand(2, 3)}, name="a case")


def _read_case(folder: pathlib.Path) -> None:
    with yf.register_flattening_functions(patch_transformers=True):
        yf.load_case(folder / "case.onnx")


def _write_calls(folder: pathlib.Path) -> None:
    model = _llama()
    with yf.record_calls(model, to=folder / "calls"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def _read_calls(folder: pathlib.Path) -> None:
    calls = yf.RecordedCalls.load(folder / "calls")
    str(calls)
    [(call.inputs, call.outputs) for call in calls]


def _write_folder(folder: pathlib.Path) -> None:
    yf.export_folder(_llama(), folder / "model", proof="sample")


def _read_folder(folder: pathlib.Path) -> None:
    str(yf.verify_folder(folder / "model"))


def _read_generator(folder: pathlib.Path) -> None:
    yf.model_folder.open_generator(folder / "model").generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def _write_adapter(folder: pathlib.Path) -> None:
    """An adapter as `add_adapter` writes it, of one layer."""
    from safetensors.torch import save_file

    yf.export_folder(_llama(), folder / "model", proof="none", adapters={})
    rows = yf.open_model(folder / "model").config.hidden_size
    layer = "model.layers.0.self_attn.q_proj"
    matrices = {f"{layer}.lora_A": torch.rand(rows, 2), f"{layer}.lora_B": torch.rand(2, rows)}
    (folder / "model/adapters").mkdir()
    save_file(matrices, folder / "model/adapters/one.safetensors")


def _read_adapter(folder: pathlib.Path) -> None:
    generator = yf.model_folder.open_generator(folder / "model")
    generator.generate(torch.tensor([[5, 6]]), max_new_tokens=2, adapter="one")


def _write_configuration(folder: pathlib.Path) -> None:
    tiny.config(max_position_embeddings=64).save_pretrained(folder)


def _read_configuration(folder: pathlib.Path) -> None:
    from yobx_flatten.model_folder.source.find import find_model

    find_model(str(folder)).load()


def _write_model(folder: pathlib.Path) -> None:
    """Weights in safetensors, settings, and a tokenizer with a chat template."""
    tiny.source(vocab_size=40).load(seed=5).save_pretrained(folder)
    tiny.chat_tokenizer().save_pretrained(folder)


def _read_streamed(folder: pathlib.Path) -> None:
    """Whole, and layer by layer."""
    from yobx_flatten.model_folder.source.find import find_model
    from yobx_flatten.model_folder.source.open import open_checkpoint

    checkpoint = open_checkpoint(folder)
    for name in checkpoint.files if checkpoint else ():
        checkpoint.read(name, torch.float32)
    find_model(str(folder)).load()


def _write_gguf(folder: pathlib.Path) -> None:
    from tests import tiny_gguf

    tiny_gguf.write(folder / "model.gguf")


def _read_gguf(folder: pathlib.Path) -> None:
    from yobx_flatten.model_folder.source.find import find_model

    find_model(str(folder / "model.gguf")).load()


def _write_peft(folder: pathlib.Path) -> None:
    import peft

    torch.manual_seed(0)
    model = tiny.source(vocab_size=40).load(seed=5)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"layers.1.*q_proj": 3})
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    file = folder / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder / "base")}))


def _read_peft(folder: pathlib.Path) -> None:
    """Merged, and as one that calls switch."""
    from yobx_flatten.model_folder.source.adapter import read_adapters
    from yobx_flatten.model_folder.source.find import find_model

    read_adapters(find_model(str(folder / "base")).load(), {"one": folder / "adapter"})
    find_model(str(folder / "adapter")).load()


def _write_sentence(folder: pathlib.Path) -> None:
    """What sentence-transformers writes after a model."""
    from safetensors.torch import save_file

    parts = {
        "1_Pooling": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8},
        "2_Dense": {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.activation.Tanh"},
        "3_Normalize": {},
    }
    for name, stated in parts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(stated))
    save_file({"linear.weight": torch.rand(4, 8), "linear.bias": torch.rand(4)}, folder / "2_Dense/model.safetensors")
    kinds = {"": "Transformer", **{name: name[2:] for name in parts}}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def _read_sentence(folder: pathlib.Path) -> None:
    from yobx_flatten.model_folder.sentence import read_modules

    read_modules(folder)


def _read_open_model(folder: pathlib.Path) -> None:
    yf.open_model(folder / "model").generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _write_checkpoint(folder: pathlib.Path) -> None:
    model, optimizer = _training()
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    rp.save_checkpoint(folder, model, optimizer=optimizer, data={"step": 3, "more": [torch.rand(2), "text"]})


def _read_checkpoint(folder: pathlib.Path) -> None:
    """Nothing is changed where it fails."""
    model, optimizer = _training()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    try:
        rp.load_checkpoint(folder, model, optimizer=optimizer)
    except (rp.RoundPipeError, FlattenError):
        after = model.state_dict().values()
        if not all(map(torch.equal, before, after)) or optimizer.state or not torch.equal(state, torch.get_rng_state()):
            raise AssertionError("a checkpoint that was refused changed something") from None
        raise
    finally:
        torch.set_rng_state(state)


def _repair_checkpoint(folder: pathlib.Path) -> None:
    """The digests, as the author of a change can compute them."""
    for manifest in folder.glob("*/checkpoint.json"):
        try:
            stated = json.loads(manifest.read_bytes())
            for name in stated["files"]:
                data = (manifest.parent / name).read_bytes()
                stated["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        except (ValueError, KeyError, TypeError, OSError, RecursionError, AttributeError):
            continue
        manifest.write_text(json.dumps(stated))


def _sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of which this process, of one, has all shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, _ = _training()
    mesh = init_device_mesh("cpu", (1,))
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _write_shards(folder: pathlib.Path) -> None:
    model, optimizer = _sharded()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rp.save_checkpoint(folder, model, optimizer=optimizer, data={"step": 3})


def _read_shards(folder: pathlib.Path) -> None:
    model, optimizer = _sharded()
    rp.load_checkpoint(folder, model, optimizer=optimizer)


def _write_timeline(folder: pathlib.Path) -> None:
    record = rp.Record(0, 1, "virtual:0", "forward", 0.0, 1.0, layer=2)
    timeline = rp.Timeline()
    timeline.records = [record, dataclasses.replace(record, start=1.0, end=2.5)]
    timeline.save(folder / "step.json")


def _read_timeline(folder: pathlib.Path) -> None:
    from roundpipe_runtime.timeline.record import merge_timelines

    merge_timelines([folder / "step.json"]).draw()


def _write_machine(folder: pathlib.Path) -> None:
    rates = {"names": ["cuda:0"], "flops": 1e12, "link": 1e9, "memory": 1e9, "host": 1e9, "host_rate": 1e9}
    (folder / "machine.json").write_text(json.dumps(rates))


def _read_machine(folder: pathlib.Path) -> None:
    from roundpipe_runtime.estimate.hardware import load_machine

    load_machine(folder / "machine.json")


def _write_text(folder: pathlib.Path) -> None:
    rows = [json.dumps({"text": f"line {number}", "more": [number]}) for number in range(20)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    (folder / "text.txt").write_text("Some lines\nof text.\n" * 10)


def _read_text(folder: pathlib.Path) -> None:
    from roundpipe_runtime.fine_tune import load_tokenizer, read_blocks

    read_blocks([str(folder)], load_tokenizer(tiny.source(), "bytes"), length=8, field="text")


def _write_chats(folder: pathlib.Path) -> None:
    _write_model(folder / "model")
    chat = [{"role": "user", "content": "the pipe"}, {"role": "assistant", "content": "holds a layer"}]
    rows = [{"messages": chat}, {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}]
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps(row) for row in [*rows, {"instruction": "a", "output": "b"}])
    )


def _read_chats(folder: pathlib.Path) -> None:
    from roundpipe_runtime.fine_tune import load_tokenizer, model_source, read_chats

    tokenizer = load_tokenizer(model_source(str(folder / "model")))
    read_chats([folder / "rows.jsonl"], tokenizer, length=32, vocab_size=40)


def _write_options(folder: pathlib.Path) -> None:
    from roundpipe_runtime.cli.train_options import (
        FileOptions,
        LearningOptions,
        StepOptions,
        TextOptions,
        format_config,
    )

    parts = {"Text": TextOptions(text=["a", "b"]), "A step": StepOptions(), "L": LearningOptions(), "F": FileOptions()}
    (folder / "run.yaml").write_text(format_config(parts.items()))


def _read_options(folder: pathlib.Path) -> None:
    """As the command line does, up to the values."""
    import typer

    from roundpipe_runtime.cli.app import app
    from roundpipe_runtime.cli.train_options import read_config_file

    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined] # it is a group
    read_config_file(typer.Context(command), folder / "run.yaml")


DOORS = {
    "nested": Door(_write_nested, _read_nested, ("*.onnx",), share=8),
    "case": Door(_write_case, _read_case, ("*.onnx",), share=8),
    "calls": Door(_write_calls, _read_calls, ("calls/*",), share=2),
    "folder": Door(_write_folder, _read_folder, ("model/*.json", "model/**/case*.onnx", "model/cases/*"), share=1),
    "generator": Door(_write_folder, _read_generator, ("model/*.json",), share=1),
    "adapter": Door(_write_adapter, _read_adapter, ("model/adapters/*",), share=1),
    "configuration": Door(_write_configuration, _read_configuration, ("*.json",), share=1),
    "model": Door(_write_model, _read_streamed, ("*.json", "*.safetensors")),
    "gguf": Door(_write_gguf, _read_gguf, ("*",)),
    "peft": Door(_write_peft, _read_peft, ("adapter/*.json", "adapter/*.safetensors")),
    "sentence": Door(_write_sentence, _read_sentence, ("*.json", "*/*")),
    "open_model": Door(_write_folder, _read_open_model, ("model/*.json",)),
    "chats": Door(_write_chats, _read_chats, ("rows.jsonl", "model/*.jinja", "model/tokenizer*")),
    "options": Door(_write_options, _read_options, ("run.yaml",)),
    "checkpoint": Door(_write_checkpoint, _read_checkpoint, ("*/*",), _repair_checkpoint, share=2),
    "shards": Door(_write_shards, _read_shards, ("*/*", "*/shards/*"), _repair_checkpoint, share=1),
    "timeline": Door(_write_timeline, _read_timeline, ("*.json",), share=2),
    "machine": Door(_write_machine, _read_machine, ("*.json",), share=2),
    "text": Door(_write_text, _read_text, ("*",), share=2),
}
"""By name."""
