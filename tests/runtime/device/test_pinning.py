"""A model in pinned memory, also after parts of it were replaced; places of tensors and gradients in its slabs."""

import gc
import io
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime import DeviceError
from roundpipe_runtime.device import pinning
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from roundpipe_runtime.device.pinning import PinnedMemory, PinnedModel, plan_slabs
from roundpipe_runtime.engine.parameters.kept import GradientMemory
from roundpipe_runtime.optim.layer_contents import scan


@pytest.fixture
def devices():
    """What stands for an accelerator: nothing is copied to it."""
    made = AcceleratorDevice.__new__(AcceleratorDevice)
    made.name, made.torch_device = "cuda:0", types.SimpleNamespace(type="xpu")
    return [made]


@pytest.fixture(autouse=True)
def slab_addresses(monkeypatch):
    """Memory in place of pinned memory, which takes an accelerator; the first and the last address of each slab."""
    found = []

    def allocate(nbytes):
        memory = memoryview(bytearray(nbytes))
        first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        found.append((first, first + nbytes))
        return memory

    monkeypatch.setattr(pinning, "_allocate", allocate)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_in(tensor, found))
    return found


def is_in(tensor, addresses):
    return any(first <= tensor.data_ptr() < last for first, last in addresses)


def test_parameters_and_buffers_are_pinned_and_keep_their_values(devices, slab_addresses):
    """The objects stay; a buffer that is a view of a parameter stays pageable, it would be cut loose otherwise."""
    model = nn.Linear(8, 4)
    model.register_buffer("table", torch.arange(6.0))
    model.register_buffer("view", model.weight.detach()[0])
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    PinnedModel(model, "alloc", devices)
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == held
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert [name for name, value in model.state_dict().items() if not is_in(value, slab_addresses)] == ["view"]


def test_parameters_that_are_parts_of_one_tensor_stay_parts_of_it(devices, slab_addresses):
    """An optimizer of the flat tensor goes on updating the model: what it writes is in the parameters."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    flat = torch.cat([parameter.detach().flatten() for parameter in model[0].parameters()])
    start = 0
    for parameter in model[0].parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    PinnedModel(model, "alloc", devices)
    flat.fill_(3.0)
    assert all(parameter.eq(3.0).all() for parameter in model[0].parameters())
    assert all(is_in(parameter, slab_addresses) for parameter in model[1].parameters())


def test_what_was_replaced_is_pinned_before_the_next_run(devices, slab_addresses):
    """``load_state_dict(assign=True)`` puts pageable tensors in the places of pinned ones."""
    model = nn.Linear(8, 4)
    pinned = PinnedModel(model, "alloc", devices)
    model.load_state_dict({"weight": torch.ones(4, 8), "bias": torch.ones(4)}, assign=True)
    assert not is_in(model.weight, slab_addresses)
    pinned.update()
    assert is_in(model.weight, slab_addresses)
    assert model.weight.eq(1).all()
    allocated = len(slab_addresses)
    pinned.update()
    assert len(slab_addresses) == allocated


@pytest.mark.parametrize("how", ["off", "alloc"])
def test_nothing_is_pinned_without_need(how, devices, slab_addresses):
    PinnedModel(nn.Linear(8, 4), how, devices if how == "off" else [])
    assert slab_addresses == []


class FakeDriver:
    """The functions of CUDA's library, for an accelerator that has them."""

    def __init__(self):
        self.status, self.registered = 0, []

    def cudaHostRegister(self, start, nbytes, flags):  # noqa: N802  # CUDA's name
        self.registered.append((start, nbytes))
        return self.status

    def cudaHostUnregister(self, start):  # noqa: N802  # CUDA's name
        self.registered = [one for one in self.registered if one[0] != start]
        return 0


@pytest.fixture
def cuda(monkeypatch, devices):
    driver = FakeDriver()
    devices[0].torch_device = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(pinning.torch.cuda, "cudart", lambda: driver)
    return driver


def test_pages_are_registered_once_and_given_back_with_the_model(devices, cuda):
    """Small parameters share pages, and CUDA refuses a page that it has."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    PinnedModel(model, "register", devices)
    pages = [page for start, nbytes in cuda.registered for page in range(start, start + nbytes, 4096)]
    assert len(pages) == len(set(pages))
    assert all(any(s <= p.data_ptr() and p.data_ptr() + p.nbytes <= s + n for s, n in cuda.registered)
               for p in model.parameters())  # fmt: skip
    assert all(start % 4096 == 0 and nbytes % 4096 == 0 for start, nbytes in cuda.registered)
    del model
    assert cuda.registered == []
    cuda.status = 712
    PinnedModel(nn.Linear(4, 4), "register", devices)
    cuda.status = 2
    with pytest.raises(DeviceError, match="CUDA error 2"):
        PinnedModel(nn.Linear(4, 4), "register", devices)


@pytest.mark.parametrize("dtype_size", [2, 4])
@pytest.mark.parametrize(
    ("shape", "alone"),
    [
        ((152064, 3584, 18944, 512, 28), 1.90),  # Qwen2.5-7B
        ((152064, 5120, 27648, 1024, 64), 1.80),  # Qwen2.5-32B
        ((32000, 5120, 13824, 5120, 40), 1.69),  # Llama-2-13B
        ((128256, 8192, 28672, 1024, 80), 1.11),  # Llama-3.1-70B
    ],
)
def test_slabs_take_a_fiftieth_more_than_their_tensors_at_most(shape, alone, dtype_size):
    """Each tensor by itself, rounded to a power of two as torch's allocator does, takes up to twice as much."""
    vocabulary, width, inner, kv_width, layers = shape  # of a decoder with gated layers and an untied head
    layer = [width * width] * 2 + [width * kv_width] * 2 + [width * inner] * 3 + [width] * 2
    sizes = [count * dtype_size for count in [vocabulary * width] * 2 + layer * layers + [width]]
    assert sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes) == pytest.approx(alone, abs=0.01)
    planned = plan_slabs(sizes)
    assert all(size & (size - 1) == 0 for size, _ in planned)
    assert sum(size for size, _ in planned) <= 1.02 * sum(sizes)


@given(st.lists(st.integers(1, 3 * 2**30), max_size=40))
@settings(deadline=None, max_examples=50)
def test_every_tensor_has_a_place_of_its_own(sizes):
    """No two overlap, none reaches over the end of its slab, and all begin at a multiple of 64 bytes."""
    seen = []
    for nbytes, placed in plan_slabs(sizes):
        stop = 0
        for number, offset in sorted(placed.items(), key=lambda one: one[1]):
            assert offset >= stop
            assert offset % 64 == 0
            stop = offset + sizes[number]
            seen.append(number)
        assert stop <= nbytes
    assert sorted(seen) == list(range(len(sizes)))


def test_a_place_is_free_again_when_its_storage_is(slab_addresses):
    memory = PinnedMemory({"a": 24, "b": 8})
    like = torch.empty(3, 2)
    tensor = memory.empty_like("a", like)
    view = tensor.view(-1)[:2]
    assert memory.empty_like("a", like) is None
    del tensor
    assert memory.empty_like("a", like) is None
    assert memory.is_held
    del view
    gc.collect()
    assert not memory.is_held
    assert memory.empty_like("a", like).shape == (3, 2)
    assert len(slab_addresses) == 1
    kept = PinnedMemory({0: 12}).empty_like(0, torch.empty(3)).fill_(2.0)
    gc.collect()
    assert kept.tolist() == [2, 2, 2]  # memory stays as long as a tensor


def test_tensors_of_one_slab_are_apart():
    memory = PinnedMemory({0: 4000, 1: 40})
    large, small = memory.empty_like(0, torch.empty(1000)).zero_(), memory.empty_like(1, torch.empty(10)).fill_(3.0)
    assert large.count_nonzero() == 0
    assert small.untyped_storage().nbytes() == 40
    file = io.BytesIO()
    torch.save(small, file)
    assert len(file.getvalue()) < 4000
    file.seek(0)
    assert torch.equal(torch.load(file), torch.full((10,), 3.0))


def test_strides_and_dtypes_stay_and_what_does_not_fit_has_no_place():
    like = torch.empty(3, 5, dtype=torch.bfloat16).t()
    found = PinnedMemory({0: 30}).empty_like(0, like)
    assert (found.dtype, found.shape, found.stride()) == (torch.bfloat16, (5, 3), (1, 5))
    for other in (torch.empty(4), torch.empty(6)[::2], torch.empty(1).expand(3)):
        assert PinnedMemory({0: 12}).empty_like(0, other) is None
    assert plan_slabs([6000, 2000, 100]) == [(8192, {0: 0, 1: 6016, 2: 8064})]
    assert plan_slabs([5000, 4096]) == [(8192, {0: 0}), (4096, {1: 0})]


@pytest.fixture
def gradients():
    """The memory for gradients of the layers of each run, and how one is taken."""
    memory = GradientMemory()

    def begin(*layers, dtype=lambda parameter: parameter.dtype):
        memory.prepare(scan(list(layers)), dtype)
        return lambda number=0: memory.take(number, layers[number].weight, torch.empty(8, 16))

    return memory, begin


def test_a_gradient_that_was_cleared_leaves_its_memory_and_one_that_is_still_there_is_not_overwritten(
    gradients, slab_addresses
):
    (memory, begin), layer, addresses = gradients, nn.Linear(16, 8), []
    for _ in range(2):
        layer.weight.grad = begin(layer)()
        addresses.append(layer.weight.grad.data_ptr())
        layer.weight.grad = None
    assert addresses[0] == addresses[1]
    assert len(slab_addresses) == 1
    first, one_set = begin(layer)().fill_(1.0), memory.nbytes
    second = begin(layer)().fill_(2.0)
    assert first.eq(1).all()
    assert memory.nbytes == 2 * one_set
    del second
    begin(layer)
    assert memory.nbytes == one_set


def test_layers_that_share_a_parameter_have_a_gradient_each_and_what_has_no_place_gets_new_memory(gradients):
    """Sums of bfloat16 parameters in float32 have the size of float32."""
    (memory, begin), layer = gradients, nn.Linear(16, 8)
    take = begin(layer, layer)
    assert take(0).data_ptr() != take(1).data_ptr()
    layer.bias.requires_grad_(False)
    begin(layer)
    assert memory.take(0, layer.bias, torch.empty(8)) is None
    assert memory.take(0, layer.weight, torch.empty(8, 16).to_sparse()) is None
    assert memory.take(0, layer.weight, torch.empty(8, 16, dtype=torch.float64)) is None
    assert begin(layer.bfloat16(), dtype=lambda parameter: torch.float32)().dtype == torch.float32
