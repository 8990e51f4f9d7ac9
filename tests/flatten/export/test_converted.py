"""Models whose weights torchao stores as integers are exported with these, from the live object (`make quantized`)."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
import transformers

from yobx_flatten import export_folder, export_onnx, open_generator

torchao = pytest.importorskip("torchao.quantization", reason="make quantized installs it")
# both register classes of torchao when they are imported
qat = pytest.importorskip("torchao.quantization.qat", reason="make quantized installs it")
pytest.importorskip("torchao.prototype.mx_formats", reason="make quantized installs it")

# torchao registers classes in ways that torch 2.13 no longer wants, when it is imported and when it converts
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def _in_groups(bits):
    from torchao.quantization.granularity import PerGroup

    return torchao.IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(32))


def _is_projection(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def _trained_and_converted(model):
    base = _in_groups(torch.int4)
    torchao.quantize_(model, qat.QATConfig(base, step="prepare"), filter_fn=_is_projection)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(3, 64, (4, 12))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fake = lambda module, name: "FakeQuantized" in type(module).__name__  # noqa: E731 # torchao asks for a function
    torchao.quantize_(model, qat.QATConfig(base, step="convert"), filter_fn=fake)


def _converted(model):
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=_is_projection)


@pytest.mark.parametrize("convert", [_trained_and_converted, _converted])
@pytest.mark.parametrize("quantize", ["keep", None])
def test_the_folder_has_the_tokens_of_the_converted_model(convert, quantize, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).train()
    convert(model)
    model.eval()
    held, prompt = type(model.model.layers[0].mlp.up_proj.weight), torch.tensor([[5, 6, 7, 8]])
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    export_folder(model, tmp_path / "out", quantize=quantize)
    found = torch.as_tensor(open_generator(tmp_path / "out").generate(prompt, max_new_tokens=8))
    assert found.tolist() == wanted.tolist()
    assert type(model.model.layers[0].mlp.up_proj.weight) is held
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.onnx*"))
    assert (size < 2 * sum(one.numel() for one in model.parameters())) == (quantize == "keep")


def test_a_module_of_ones_own_keeps_its_integers(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
    torchao.quantize_(module, _in_groups(torch.int8))
    export_onnx(module, (torch.randn(2, 64),), path=tmp_path / "own.onnx", quantize="keep")
    x = torch.randn(5, 64)
    (found,) = onnxruntime.InferenceSession(tmp_path / "own.onnx").run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.tensor(found), module(x).detach(), atol=1e-4, rtol=1e-4)
