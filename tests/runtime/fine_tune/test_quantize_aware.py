"""A model that is trained in integers is exported with these integers, and chooses the same tokens."""

import json

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

import transformers

from roundpipe_runtime import ConfigError, fine_tune
from roundpipe_runtime.checkpoint import CheckpointError
from roundpipe_runtime.fine_tune import Lora, Settings, Training, model_source, quantize_aware
from roundpipe_runtime.fine_tune.adapters import RoundedLinear, unrounded_state
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime import tiny_training as tiny
from yobx_flatten import export_folder, open_generator

pytestmark = pytest.mark.slow

STEPS = Settings(batch=4, microbatches=2, steps=6, warmup=1, lr=1e-2, devices="virtual:2", check=False)
NAMES = ["int4", "int8 with adapters", "int4 with adapters of two modules"]


@pytest.fixture
def folder(tmp_path):
    return tiny.weights_folder(tmp_path / "model")


def made(folder, name):
    lora = Lora.parse("2,8,q_proj,down_proj" if "two" in name else "4") if "adapters" in name else None
    return quantize_aware(model_source(folder).load(), name[:4], lora=lora, seed=1)


def rows(length=16):
    words = torch.randint(3, 13, (40 * length,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return fine_tune.make_blocks(words, length=length, eval_share=0.1)


def by_formula(weight, bits):
    """Integers and scales of a matrix, computed with NumPy."""
    blocks = weight.detach().numpy().astype(numpy.float32).reshape(len(weight), -1, 32)
    half = 2 ** (bits - 1)
    scales = (numpy.abs(blocks).max(2, keepdims=True) / numpy.float32(half - 0.5)).astype(numpy.float16)
    scales = scales.astype(numpy.float32)
    return numpy.rint(blocks / scales).clip(-half, half - 1), scales


def rounding_layers(model):
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, RoundedLinear)}


def whole_weight(layer):
    if layer.lora_a is None:
        return layer.weight.detach()
    return (layer.weight + layer.scaling * (layer.lora_b @ layer.lora_a)).detach()


def unpacked(packed, rows, *, four, signed):
    """The integers of a matrix, of which bytes hold two or one, with their middle at zero or at half of them."""
    numbers = numpy.stack([packed & 15, packed >> 4], -1) if four else packed
    middle = 8 if four else 128
    return (numbers ^ (middle if signed else 0)).reshape(rows, -1).astype(numpy.int16) - middle


def stored_integers(folder):
    if (folder / "model.xml").exists():
        import openvino

        nodes = openvino.Core().read_model(folder / "model.xml").get_ops()
        found = [(one, one.get_element_type().get_type_name()) for one in nodes if one.get_type_name() == "Constant"]
        return [
            unpacked(node.data.reshape(-1).view(numpy.uint8), node.shape[0], four=kind == "i4", signed=True)
            for node, kind in found
            if kind in ("i4", "i8") and len(node.shape) == 3
        ]
    import onnx

    tensors = [one for one in onnx.load(folder / "model.onnx").graph.initializer if one.name.endswith(("_Q4", "_Q8"))]
    arrays = [(onnx.numpy_helper.to_array(one), one.name.endswith("_Q4")) for one in tensors]
    return [unpacked(packed, len(packed), four=four, signed=False) for packed, four in arrays]


def tokens_that_differ(model, folder, *, prompts, tokens):
    starts = torch.randint(3, 40, (prompts, 5), generator=torch.Generator().manual_seed(3))
    model.eval()
    how = {"max_new_tokens": tokens, "eos_token_id": -1}  # a token that there is not
    wanted = model.generate(starts, attention_mask=torch.ones_like(starts), do_sample=False, pad_token_id=0, **how)
    found = torch.as_tensor(open_generator(folder).generate(starts, pad_token_id=0, **how))
    assert found.shape == wanted.shape == (prompts, 5 + tokens)
    return int((found != wanted).sum()), prompts * tokens


@pytest.mark.parametrize(
    ("name", "target"),
    [(NAMES[0], "onnxruntime"), (NAMES[1], "onnxruntime"), (NAMES[2], "openvino"), (NAMES[1], "openvino")],
)
def test_the_file_has_the_integers_and_the_tokens_of_the_training(folder, name, target, tmp_path):
    """From a saved folder: 0 of 500 tokens differ, and each integer is that of the formula on the trained weights."""
    pytest.importorskip(target)
    pytest.importorskip("onnxruntime")
    model, bits = made(folder, name), int(name[3])
    before = {path: layer.weight.clone() for path, layer in rounding_layers(model).items()}
    with Training(model, rows(), STEPS) as training:
        training.train()
    layers = rounding_layers(model)
    assert len(layers) == 3 * 7
    learnt = [path for path, layer in layers.items() if not torch.equal(whole_weight(layer), before[path])]
    assert len(learnt) == (6 if "two" in name else 21)
    fine_tune.save_model(model, tiny.word_tokenizer(), tmp_path / "out", source=model_source(folder))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    export_folder(tmp_path / "out", tmp_path / "file", quantize="keep", target=target)
    assert tokens_that_differ(model, tmp_path / "file", prompts=10, tokens=50) == (0, 500)
    kept = stored_integers(tmp_path / "file")
    wanted = [by_formula(whole_weight(layer), bits)[0].reshape(len(layer.weight), -1) for layer in layers.values()]
    assert all(any(numpy.array_equal(one, other) for other in kept) for one in wanted)


def test_the_live_model_is_exported_with_its_integers(folder, tmp_path):
    """Without a folder between: the rounding of the trace becomes the integers of the file."""
    pytest.importorskip("onnxruntime")
    model = made(folder, "int4")
    export_folder(model, tmp_path / "file", quantize="keep")
    assert tokens_that_differ(model, tmp_path / "file", prompts=2, tokens=50) == (0, 100)
    kept = stored_integers(tmp_path / "file")
    one = model.model.layers[1].mlp.up_proj
    wanted = by_formula(one.weight, 4)[0].reshape(len(one.weight), -1)
    assert any(numpy.array_equal(wanted, found) for found in kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_training_has_the_same_bits(folder, name, tmp_path):
    """Stopped after 3 of 6 steps, and continued in a new model on another number of devices."""
    whole, first, second = (made(folder, name) for _ in range(3))
    with Training(whole, rows(), STEPS) as training:
        training.train()
    with Training(first, rows(), STEPS) as training:
        tiny.records_of(training, stop=3, checkpoints=tmp_path / "checkpoints")
    with Training(second, rows(), Settings(**{**vars(STEPS), "devices": "virtual:1"})) as training:
        assert training.restore(tmp_path / "checkpoints")
        training.train()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    other = made(folder, name.replace("int4", "int2").replace("int8", "int4").replace("int2", "int8"))
    with Training(other, rows(), STEPS) as training, pytest.raises(CheckpointError, match="a different model"):
        training.restore(tmp_path / "checkpoints")


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_the_rounded_model(folder, name):
    """Of a plain model whose weights are rounded: its loss, and of its weight the gradient, through LoRA's formula."""
    model = made(folder, name)
    with torch.no_grad():
        for layer in rounding_layers(model).values():
            if layer.lora_b is not None:
                layer.lora_b.normal_(std=0.05)
    plain = transformers.LlamaForCausalLM(model.config)
    state = plain.state_dict()
    for path, layer in rounding_layers(model).items():
        numbers, scales = by_formula(whole_weight(layer), int(name[3]))
        state[f"{path}.weight"] = torch.tensor(numbers * scales).reshape(layer.weight.shape)
    state |= {key: value for key, value in model.state_dict().items() if key not in state or "proj" not in key}
    plain.load_state_dict({key: value for key, value in state.items() if "lora" not in key})
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in unrounded_state(model).items())
    ids = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(2))
    wanted = plain(input_ids=ids, labels=ids).loss
    wanted.backward()
    pipeline = wrap_model_to_roundpipe(model, lower_threshold=0, devices="virtual:2")
    try:
        found = pipeline.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        pipeline.synchronize()
    finally:
        pipeline.close()
    torch.testing.assert_close(torch.as_tensor(found), wanted.detach(), rtol=1e-6, atol=0)
    one, other = model.model.layers[1].self_attn.q_proj, plain.model.layers[1].self_attn.q_proj.weight.grad
    if one.lora_a is None:
        torch.testing.assert_close(one.weight.grad, other, rtol=1e-4, atol=1e-7)
    else:
        torch.testing.assert_close(one.lora_a.grad, one.scaling * one.lora_b.T @ other, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(one.lora_b.grad, one.scaling * other @ one.lora_a.T, rtol=1e-4, atol=1e-7)
        assert one.weight.grad is None


def test_tables_are_rounded_once_and_do_not_learn(folder):
    """A tied table too: whole steps of its scale in 8 bits."""
    model = quantize_aware(model_source(folder).load(), "int4")
    table = model.get_input_embeddings().weight
    numbers, scales = by_formula(model_source(folder).load().get_input_embeddings().weight, 8)
    assert torch.equal(table, torch.tensor(numbers * scales).reshape(table.shape))
    assert not table.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: quantize_aware(model, "int3"), "kind must be int4 or int8, found 'int3'"),
        (lambda model: quantize_aware(model.bfloat16(), "int4"), r"weights in bfloat16, .* Use model\.float\(\)"),
        (
            lambda model: quantize_aware(
                transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2)), "int4"
            ),
            "GPT2LMHeadModel has no layers with an nn.Linear .*--quantize int4",
        ),
        (lambda model: quantize_aware(model, "int4", lora=Lora(2, 4, ("qproj",))), "has no module qproj"),
    ],
)
def test_what_cannot_be_trained_in_integers_is_refused(folder, call, message):
    model = model_source(folder).load()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises((ConfigError, fine_tune.FineTuneError), match=message) as refused:
        call(model)
    assert "\n" not in str(refused.value)
    after = model.state_dict()
    assert all(torch.equal(after[key], value.to(after[key].dtype)) for key, value in before.items())
