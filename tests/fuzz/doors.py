"""The doors that files of strangers come through: what writes a file, what reads it, and what may be changed."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import roundpipe_runtime as rp
import yobx_flatten as yf
from roundpipe_runtime.estimate.hardware import load_machine
from roundpipe_runtime.fine_tune import load_tokenizer, model_source, read_blocks, read_chats
from roundpipe_runtime.schedule.timeline import merge_timelines
from tests.runtime import tiny_training as tiny
from yobx_flatten.errors import FlattenError
from yobx_flatten.model_folder.sentence import read_modules
from yobx_flatten.model_folder.source.adapter import read_adapters
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.open import open_checkpoint


@dataclasses.dataclass(frozen=True)
class Door:
    """A kind of file."""

    write: Callable[[pathlib.Path], object]
    read: Callable[[pathlib.Path], object]
    files: tuple[str, ...]
    repair: Callable[[pathlib.Path], None] = lambda folder: None  # there is no digest to make right
    share: int = 1


def _values() -> dict[str, Any]:
    """Nested values of all kinds that transformers, dataclasses and Python have."""
    cache = yf.make_dynamic_cache([(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4))] * 2)
    return {
        "ids": torch.arange(6).reshape(2, 3),
        "cache": cache,
        "more": [(torch.rand(2).bfloat16(), None, 1.5, "text", torch.float16), {3: torch.tensor(True)}],
        "config": LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    }


def _registered(call: Callable[[pathlib.Path], object]) -> Callable[[pathlib.Path], None]:
    def inside(folder):
        with yf.register_flattening_functions(patch_transformers=True):
            call(folder)

    return inside


def _load(name: str = "") -> Callable[[pathlib.Path], object]:
    return lambda folder: find_model(str(folder / name)).load()


def _write_gguf(folder):
    from tests import tiny_gguf

    tiny_gguf.write(folder / "model.gguf")


def _write_folder(folder):
    yf.export_folder(small_model("llama"), folder / "model", proof="sample")


def _read_generator(folder):
    yf.model_folder.open_generator(folder / "model").generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def _write_calls(folder):
    model = small_model("llama")
    with yf.record_calls(model, to=folder / "calls"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def _read_calls(folder):
    calls = yf.RecordedCalls.load(folder / "calls")
    str(calls)
    [(call.inputs, call.outputs) for call in calls]


def _write_adapter(folder):
    """An adapter as `add_adapter` writes it, of one layer."""
    yf.export_folder(small_model("llama"), folder / "model", proof="none", adapters={})
    rows = yf.open_model(folder / "model").config.hidden_size
    layer = "model.layers.0.self_attn.q_proj"
    matrices = {f"{layer}.lora_A": torch.rand(rows, 2), f"{layer}.lora_B": torch.rand(2, rows)}
    (folder / "model/adapters").mkdir()
    save_file(matrices, folder / "model/adapters/one.safetensors")


def _read_adapter(folder):
    generator = yf.model_folder.open_generator(folder / "model")
    generator.generate(torch.tensor([[5, 6]]), max_new_tokens=2, adapter="one")


def _write_model(folder):
    """Weights in safetensors, settings, and a tokenizer with a chat template."""
    tiny.source(vocab_size=40).load(seed=5).save_pretrained(folder)
    tiny.chat_tokenizer().save_pretrained(folder)


def _read_streamed(folder):
    """Whole, and layer by layer."""
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.files if checkpoint else ():
        checkpoint.read(name, torch.float32)
    find_model(str(folder)).load()


def _write_peft(folder):
    import peft

    torch.manual_seed(0)
    model = tiny.source(vocab_size=40).load(seed=5)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"layers.1.*q_proj": 3})
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    file = folder / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder / "base")}))


def _read_peft(folder):
    """Merged, and as one that calls switch."""
    read_adapters(find_model(str(folder / "base")).load(), {"one": folder / "adapter"})
    find_model(str(folder / "adapter")).load()


def _write_sentence(folder):
    """What sentence-transformers writes after a model."""
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


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _write_checkpoint(folder):
    model, optimizer = _training()
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    rp.save_checkpoint(folder, model, optimizer=optimizer, data={"step": 3, "more": [torch.rand(2), "text"]})


def _read_checkpoint(folder):
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


def _repair_checkpoint(folder):
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


def _write_shards(folder):
    model, optimizer = _sharded()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rp.save_checkpoint(folder, model, optimizer=optimizer, data={"step": 3})


def _read_shards(folder):
    model, optimizer = _sharded()
    rp.load_checkpoint(folder, model, optimizer=optimizer)


def _write_timeline(folder):
    record = rp.Record(0, 1, "virtual:0", "forward", 0.0, 1.0, layer=2)
    timeline = rp.Timeline()
    timeline.records = [record, dataclasses.replace(record, start=1.0, end=2.5)]
    timeline.save(folder / "step.json")


def _write_text(folder):
    rows = [json.dumps({"text": f"line {number}", "more": [number]}) for number in range(20)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    (folder / "text.txt").write_text("Some lines\nof text.\n" * 10)


def _write_chats(folder):
    _write_model(folder / "model")
    chat = [{"role": "user", "content": "the pipe"}, {"role": "assistant", "content": "holds a layer"}]
    rows = [{"messages": chat}, {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}]
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps(row) for row in [*rows, {"instruction": "a", "output": "b"}])
    )


def _read_chats(folder):
    tokenizer = load_tokenizer(model_source(str(folder / "model")))
    read_chats([folder / "rows.jsonl"], tokenizer, length=32, vocab_size=40)


def _write_options(folder):
    from roundpipe_runtime.cli.train_options import (
        FileOptions,
        LearningOptions,
        StepOptions,
        TextOptions,
        format_config,
    )

    parts = {"Text": TextOptions(text=["a", "b"]), "A step": StepOptions(), "L": LearningOptions(), "F": FileOptions()}
    (folder / "run.yaml").write_text(format_config(parts.items()))


def _read_options(folder):
    """As the command line does, up to the values."""
    import typer

    from roundpipe_runtime.cli.app import app
    from roundpipe_runtime.cli.train_options import read_config_file

    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined] # it is a group
    read_config_file(typer.Context(command), folder / "run.yaml")


RATES = {"names": ["cuda:0"], "flops": 1e12, "link": 1e9, "memory": 1e9, "host": 1e9, "host_rate": 1e9}
DOORS = {
    "nested": Door(
        _registered(lambda folder: yf.save_nested(folder / "values.onnx", _values())),
        _registered(lambda folder: yf.load_nested(folder / "values.onnx")),
        ("*.onnx",),
        share=8,
    ),
    "case": Door(
        _registered(
            lambda folder: yf.save_case(folder / "case.onnx", _values(), {"logits": torch.rand(2, 3)}, name="a case")
        ),
        _registered(lambda folder: yf.load_case(folder / "case.onnx")),
        ("*.onnx",),
        share=8,
    ),
    "calls": Door(_write_calls, _read_calls, ("calls/*",), share=2),
    "folder": Door(
        _write_folder,
        lambda folder: str(yf.verify_folder(folder / "model")),
        ("model/*.json", "model/**/case*.onnx", "model/cases/*"),
    ),
    "generator": Door(_write_folder, _read_generator, ("model/*.json",)),
    "adapter": Door(_write_adapter, _read_adapter, ("model/adapters/*",)),
    "configuration": Door(
        lambda folder: tiny.config(max_position_embeddings=64).save_pretrained(folder), _load(), ("*.json",)
    ),
    "model": Door(_write_model, _read_streamed, ("*.json", "*.safetensors")),
    "gguf": Door(_write_gguf, _load("model.gguf"), ("*",)),
    "peft": Door(_write_peft, _read_peft, ("adapter/*.json", "adapter/*.safetensors")),
    "sentence": Door(_write_sentence, read_modules, ("*.json", "*/*")),
    "open_model": Door(
        _write_folder,
        lambda folder: yf.open_model(folder / "model").generate(torch.tensor([[5, 6]]), max_new_tokens=2),
        ("model/*.json",),
    ),
    "chats": Door(_write_chats, _read_chats, ("rows.jsonl", "model/*.jinja", "model/tokenizer*")),
    "options": Door(_write_options, _read_options, ("run.yaml",)),
    "checkpoint": Door(_write_checkpoint, _read_checkpoint, ("*/*",), _repair_checkpoint, share=2),
    "shards": Door(_write_shards, _read_shards, ("*/*", "*/shards/*"), _repair_checkpoint),
    "timeline": Door(
        _write_timeline, lambda folder: merge_timelines([folder / "step.json"]).draw(), ("*.json",), share=2
    ),
    "machine": Door(
        lambda folder: (folder / "machine.json").write_text(json.dumps(RATES)),
        lambda folder: load_machine(folder / "machine.json"),
        ("*.json",),
        share=2,
    ),
    "text": Door(
        _write_text,
        lambda folder: read_blocks([str(folder)], load_tokenizer(tiny.source(), "bytes"), length=8, field="text"),
        ("*",),
        share=2,
    ),
}
