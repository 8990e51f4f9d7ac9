"""Files of a model for the device: ONNX with the CUDA provider where onnxruntime has it, AOTInductor, models on it."""

import copy
import shutil

import pytest
import torch
from torch import nn

from tests.gpu.models import llama, tokens
from tests.gpu.place import on_a_device

pytestmark = on_a_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama as a folder of onnxruntime, and the model."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    pytest.importorskip("msgspec", reason="a folder is read with msgspec, which is not installed")
    from yobx_flatten import export_folder

    model = llama(use_cache=True, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, eos_token_id=None, bos_token_id=None).eval()  # fmt: skip
    path = tmp_path_factory.mktemp("onnx") / "llama"
    export_folder(model, path, proof="sample")
    return path, model


def provider(place):
    """The provider of onnxruntime for the device; the one of the CPU where the device is made of it."""
    if place.torch_device.type != "cuda":
        return "cpu"
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no provider for CUDA")
    return "cuda"


def test_a_folder_generates_what_the_model_does(place, folder):
    from yobx_flatten import open_generator

    path, model = folder
    prompt = tokens(1, rows=2, length=6)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    found = open_generator(path, device=provider(place)).generate(prompt, max_new_tokens=6)
    assert torch.as_tensor(found).tolist() == expected.tolist()


def test_a_folder_is_verified_there(place, folder):
    from yobx_flatten import verify_folder

    assert verify_folder(folder[0], device=provider(place)).ok


def test_a_model_on_the_device_becomes_a_program(place):
    from yobx_flatten import export_program

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(place.torch_device).eval()
    inputs = torch.randn(3, 4, device=place.torch_device)
    exported = export_program(model, (inputs,))
    assert exported.report.ok
    found = exported.program.module()(inputs)
    assert found.device.type == place.torch_device.type
    torch.testing.assert_close(found, model(inputs))


def test_a_package_of_aotinductor_computes_what_the_model_does(place, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    if place.torch_device.type not in ("cpu", "cuda"):
        pytest.skip(f"torch does not compile for {place.torch_device.type}")
    if place.torch_device.type == "cuda":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            pytest.skip("there are no headers of CUDA: gpu_day.py names those that came with torch")
    from yobx_flatten import export_program

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    there = copy.deepcopy(model).to(place.torch_device)
    inputs = torch.randn(3, 4)
    assert export_program(there, (inputs.to(place.torch_device),)).to_aotinductor(tmp_path / "model.pt2").ok
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(inputs.to(place.torch_device))
    found = found[0] if isinstance(found, (list, tuple)) else found
    assert found.device.type == place.torch_device.type
    torch.testing.assert_close(found.cpu(), model(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_on_the_device_comes_apart_and_together(place, dtype):
    pytest.importorskip("transformers")
    from torch.utils import _pytree as pytree
    from transformers import DynamicCache

    from yobx_flatten import register_flattening_functions

    cache = DynamicCache()
    for layer in range(2):
        one = torch.randn(1, 2, 3, 4, dtype=dtype, device=place.torch_device)
        cache.update(one, one + 1, layer)
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(cache)
        again = pytree.tree_unflatten(leaves, spec)
    assert [one.device.type for one in leaves] == [place.torch_device.type] * 4
    assert {one.dtype for one in leaves} == {dtype}
    for layer in range(2):
        assert again.layers[layer].keys is cache.layers[layer].keys
        assert again.layers[layer].values is cache.layers[layer].values
