"""Weights of bitsandbytes and torchao with LoRA: a pipeline trains what the plain model does (`make quantized`)."""

import gc
import json
import pathlib

import pytest
import torch
from torch import nn

bitsandbytes = pytest.importorskip("bitsandbytes", reason="make quantized installs it")
torchao = pytest.importorskip("torchao.quantization", reason="make quantized installs it")
peft = pytest.importorskip("peft", reason="LoRA is PEFT's")

import transformers  # noqa: E402 # after torchao, which it registers classes of

from roundpipe_runtime import RoundPipeRunConfig, load_checkpoint, save_checkpoint  # noqa: E402
from roundpipe_runtime.__main__ import main  # noqa: E402
from roundpipe_runtime.device.composite import is_composite, stored_bytes  # noqa: E402
from roundpipe_runtime.estimate.footprint import Footprint  # noqa: E402
from roundpipe_runtime.fine_tune import Lora, add_lora, model_source  # noqa: E402
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe  # noqa: E402
from roundpipe_runtime.huggingface.plan_training import model_on_meta  # noqa: E402
from roundpipe_runtime.huggingface.quantize import count_weights, quantize_frozen  # noqa: E402
from yobx_flatten.errors import MissingDependencyError  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # what plain bitsandbytes says of its own int8 when it is evaluated
    pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning"),
    # what PEFT says of torchao: it cannot merge
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),
    # a gradient that a check would lose would be said here
    pytest.mark.filterwarnings("error:.*autograd kernel was not registered.*"),
]

WIDTH = 128
CONFIG = transformers.LlamaConfig(
    hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
)


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG).to(dtype).requires_grad_(False)


def replaced(model, make):
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child))
    return model


def four_bits(kind, nested):
    def make(linear):
        how = {"quant_type": kind, "compress_statistics": nested}
        made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, **how)
        made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **how)
        return made.to("cpu")

    return make


def eight_bits(linear):
    made = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False)
    return made.to("cpu")


def nf4_of_torchao(linear):
    linear.weight = nn.Parameter(torchao.to_nf4(linear.weight.data), requires_grad=False)
    return linear


def by_torchao(model, config):
    torchao.quantize_(model.model.layers, config)
    return model


KINDS = {
    "nf4 of bitsandbytes": (lambda model: replaced(model, four_bits("nf4", True)), 4.6),
    "fp4 of bitsandbytes, plain scales": (lambda model: replaced(model, four_bits("fp4", False)), 4.6),
    "int8 of bitsandbytes": (lambda model: replaced(model, eight_bits), 8.3),
    "nf4 of torchao": (lambda model: replaced(model, nf4_of_torchao), 4.6),
    "int8 of torchao": (lambda model: by_torchao(model, torchao.Int8WeightOnlyConfig()), 8.4),
    "int4 of torchao, in bytes": (
        lambda model: by_torchao(model, torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
        8.4,
    ),
    "nf4 of quantize_frozen": (lambda model: quantize_frozen(model, "nf4"), 4.6),
    "int8 of quantize_frozen": (lambda model: quantize_frozen(model, "int8"), 8.4),
}


def adapted(kind, dtype=torch.float32):
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(KINDS[kind][0](llama(dtype)), lora).train()


def batch():
    tokens = torch.randint(5, 100, (6, 10), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def adam(model):
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def steps(pipe, optimizer, count):
    losses = []
    for _ in range(count):
        losses.append(pipe.forward_backward(input_kwargs=batch()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_plain_model(kind):
    plain, model = adapted(kind), adapted(kind)
    optimizer = adam(plain)
    expected, gradients = [], {}
    for _ in range(5):
        loss = plain(**batch()).loss
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    pipe = wrap_model_to_roundpipe(model, devices="virtual:2:check", lower_threshold=0)
    assert len(pipe.cut.report.pieces) == 5
    assert pipe.cut.report.equivalence.gradients < 1e-5
    pipe.forward_backward(input_kwargs=batch())
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert (p.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name
    model.zero_grad()
    optimizer = adam(model)
    found = steps(pipe, optimizer, 2)
    pipe.eval()
    with torch.no_grad():
        pipe(input_ids=batch()["input_ids"])
    pipe.train()
    found += steps(pipe, optimizer, 3)
    assert found == pytest.approx(expected, abs=1e-5)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and is_composite(m.weight)]
    bits = 8 * sum(stored_bytes(m.weight) for m in linear) / sum(m.in_features * m.out_features for m in linear)
    assert len(linear) == 21
    # a table of 16 or 256 numbers with each weight counts here, where weights are small
    assert bits < KINDS[kind][1] + 8 * 1200 / WIDTH**2


@pytest.mark.parametrize("kind", ["nf4 of bitsandbytes", "int8 of bitsandbytes", "int8 of torchao"])
def test_a_resumed_training_has_the_same_bits(kind, tmp_path):
    """The checkpoint holds no frozen weight, whose state dict some libraries cannot load."""

    def training():
        pipe = wrap_model_to_roundpipe(adapted(kind), devices="virtual:2", lower_threshold=0)
        return pipe, adam(pipe)

    whole, optimizer = training()
    steps(whole, optimizer, 2)
    path = save_checkpoint(tmp_path, whole, optimizer=optimizer).path
    expected = steps(whole, optimizer, 2)
    resumed, optimizer = training()
    load_checkpoint(tmp_path, resumed, optimizer=optimizer)
    assert steps(resumed, optimizer, 2) == expected
    assert (path / "model.safetensors").stat().st_size < 300_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 259, "dtype": "bfloat16"})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(home / "llama")
    (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return home


def test_train_quantizes_as_it_reads(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded as a whole")
    )
    line = f"train {folder / 'llama'} {folder / 'text.txt'} --tokenizer bytes --quantize nf4 -o {tmp_path}/"
    assert main(f"{line}without".split()) == 2
    error = "--quantize nf4 freezes all weights, so nothing would train. Add adapters: --lora 8"
    assert error in capsys.readouterr().err

    def trained(name, steps, *more):
        options = "--lora 4 --length 16 --batch 4 --devices virtual:2 --json --every 2 --schedule constant --warmup 0"
        assert main([*f"{line}{name} {options} --steps {steps}".split(), *more]) == 0
        return json.loads(capsys.readouterr().out)

    whole = trained("whole", 4)
    half = tmp_path / "half"
    trained("half", 2)
    resumed = trained("half", 4, "--resume", "--overwrite")
    assert resumed["last_step"]["loss"] == whole["last_step"]["loss"]
    adapters = [(path / "adapter_model.safetensors").read_bytes() for path in (half, tmp_path / "whole")]
    assert adapters[0] == adapters[1]
    stated = json.loads((half / "adapter_config.json").read_text())
    assert pathlib.Path(stated["base_model_name_or_path"]) == folder / "llama"


def test_the_weights_are_those_of_a_model_that_was_loaded_first(folder):
    read = model_source(folder / "llama").load(quantize="nf4")
    loaded = quantize_frozen(model_source(folder / "llama").load(), "nf4")
    found, expected = read.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert count_weights(read) == sum(p.numel() for p in model_source(folder / "llama").load().parameters())


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.3), ("fp4", 0.3), ("int8", 0.53)])
def test_the_plan_counts_payload_and_scales(kind, most):
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4
    )
    sizes = {}
    for how in (kind, None):
        model = model_on_meta(config, dtype=torch.bfloat16)
        model = model if how is None else quantize_frozen(model, how)
        sizes[how] = sum(stored_bytes(p) for layer in model.model.layers for p in layer.parameters())
    assert sizes[kind] <= most * sizes[None]


def test_plan_prints_what_train_moves(folder, capsys):
    found = {}
    for kind in ("none", "nf4"):
        line = f"plan {folder / 'llama'} --lora 4 --quantize {kind} --length 16 --devices virtual:1 --memory 1GB --json"
        assert main(line.split()) == 0
        found[kind] = json.loads(capsys.readouterr().out)
    assert found["nf4"]["parameters"] == found["none"]["parameters"]
    frozen = {kind: one["layers"][1]["frozen_bytes"] for kind, one in found.items()}
    saved = frozen["none"] - frozen["nf4"]
    assert frozen["nf4"] < 0.4 * frozen["none"]  # tables of 272 numbers with each weight count, where it is small
    host = {kind: one["host_memory"]["parameters"] for kind, one in found.items()}
    assert host["none"] - host["nf4"] == 3 * saved


def test_the_bytes_on_the_link_are_those_of_four_bits():
    """A step of a model with layers of 1024: at most 0.3 of what bfloat16 moves for the same frozen layers."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, vocab_size=64
    )
    moved = {}
    for kind in ("nf4", None):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).bfloat16().requires_grad_(False)
        model = model if kind is None else quantize_frozen(model, kind)
        model = add_lora(model, Lora(1, 1, ("q_proj",)))
        pipe = wrap_model_to_roundpipe(
            model, devices="virtual:1", lower_threshold=0, model_run_config=RoundPipeRunConfig(num_microbatch=1)
        )
        tokens = torch.arange(16).reshape(2, 8)
        pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
        before = pipe.parameter_traffic.uploaded
        pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
        moved[kind] = pipe.parameter_traffic.uploaded - before
        gc.collect()
    assert moved["nf4"] <= 0.3 * moved[None]


def test_a_plan_counts_the_products_of_four_bits():
    found = {}
    for kind in ("nf4", None):
        layers = nn.Sequential(nn.ModuleList([nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)]))
        layers = layers.to("meta").requires_grad_(False)
        layer = (layers if kind is None else quantize_frozen(layers, kind))[0][0]
        with Footprint() as counted:
            layer(torch.empty(3, 64, device="meta", requires_grad=True)).sum().backward()
        found[kind] = counted.flops
    assert found["nf4"] == found[None] == 2 * 2 * 3 * 64 * 128


def test_what_cannot_be_quantized_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="kind must be one of nf4, fp4, int8, found 'int3'"):
        quantize_frozen(llama(), "int3")
    with pytest.raises(ValueError, match="Linear has no linear layer in a ModuleList"):
        quantize_frozen(nn.Linear(2, 2))
    model = model_on_meta(CONFIG)
    with pytest.raises(
        ValueError, match=r"weights\('model\.embed_tokens\.weight'\) has shape \(2,\), and \(100, 128\)"
    ):
        quantize_frozen(model, weights=lambda name: torch.ones(2))
    monkeypatch.setattr("yobx_flatten.errors.is_installed", lambda library: False)
    with pytest.raises(MissingDependencyError, match="nf4 needs bitsandbytes"):
        quantize_frozen(llama())


class Scaled(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        self.register_buffer("scale", torch.full((64,), 0.5), persistent=persistent)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_buffers_on_meta_are_read_like_weights():
    torch.manual_seed(0)
    plain, x = Scaled(persistent=True), torch.randn(3, 64)
    held = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.device("meta"):
        empty, without = Scaled(persistent=True), Scaled(persistent=False)
    read = quantize_frozen(empty, "int8", weights=held.__getitem__)
    assert not any(one.is_meta for one in (*read.parameters(), *read.buffers()))
    assert torch.equal(read(x), quantize_frozen(plain, "int8")(x))
    with pytest.raises(ValueError, match=r"the buffer 'scale' is on meta(.|\n)*init_empty_weights"):
        quantize_frozen(without, "int8", weights=held.__getitem__)
    assert all(parameter.requires_grad for parameter in without.parameters())  # it is as it was
