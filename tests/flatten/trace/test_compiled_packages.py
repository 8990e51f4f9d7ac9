"""Packages of AOTInductor: a call inside the block passes the strides that the code was compiled for."""

import copy
import os
import shutil

import pytest
import torch

from yobx_flatten import dynamic_shapes, register_flattening_functions
from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.trace.program import called_contiguous

pytestmark = pytest.mark.slow

compiles = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler"
)


class Step(torch.nn.Module):
    def forward(self, x, cache):
        places = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None]
        total = (x * (1 + places)).sum((1, 2, 3))
        for index in range(2):
            keys, values = cache.update(x, x, index)
            total = total + (keys.cumsum(2) * 2 + values.cumsum(2)).sum((1, 2, 3))
        return total


def tokens(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(*, batch, past, new, sliced):

    def made(seed, length):
        tensor = tokens(batch, 2, length + 3, 4, seed=seed)[:, :, 3:]
        return tensor if sliced else tensor.contiguous()

    window = min(past, 7)
    pairs = [(made(1, past), made(2, past)), (made(3, window), made(4, window))]
    cache = make_dynamic_cache(pairs, ["DynamicLayer", "DynamicSlidingWindowLayer"], [{}, {"sliding_window": 8}])
    cache.layers[1].cumulative_length = past
    return {"x": made(5, new), "cache": cache}


def compiled(program, path):
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))
    return torch._inductor.aoti_load_package(os.fspath(path))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    example = inputs(batch=2, past=9, new=3, sliced=True)
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(Step(), (), copy.deepcopy(example), dynamic_shapes=dynamic_shapes(example))
        return compiled(program, tmp_path_factory.mktemp("package") / "step.pt2")


@compiles
@pytest.mark.parametrize("sliced", [False, True], ids=["contiguous", "slices"])
@pytest.mark.parametrize(("batch", "past", "new"), [(2, 9, 3), (3, 5, 2), (4, 21, 6)])
def test_a_package_is_right_for_slices(package, batch, past, new, sliced):
    given = inputs(batch=batch, past=past, new=new, sliced=sliced)
    expected = Step()(**copy.deepcopy(given))
    with register_flattening_functions(patch_transformers=True):
        found = package(**given)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@compiles
def test_a_package_that_was_compiled_elsewhere_is_called_as_it_was(tmp_path):
    """Its example was strided, and so are its inputs: they are none of the block's business."""

    class Add(torch.nn.Module):
        def forward(self, x):
            return x * 2 + torch.arange(x.shape[1])

    x = torch.arange(12.0).reshape(2, 6)[:, 2:]
    program = torch.export.export(Add(), (x,))
    package = compiled(program, tmp_path / "add.pt2")
    with register_flattening_functions():
        assert package(x).tolist() == Add()(x).tolist()


class Loader:
    """Stands in for torch's; the first of two inputs was contiguous in the example."""

    def get_metadata(self):
        return {"yobx_flatten.contiguous": "10"}

    def boxed_run(self, inputs):
        return [tensor.stride() for tensor in inputs]


class Package:
    def __init__(self, loader):
        self.loader = loader

    def get_metadata(self):
        return self.loader.get_metadata()

    def __call__(self, *args):
        return self.loader.boxed_run(list(args))


def test_an_input_that_was_strided_in_the_example_stays_so():
    """Only what was contiguous for the trace is made so; too many inputs go on to the package, which refuses them."""
    strided = torch.zeros(3, 4).T
    call = called_contiguous(Package.__call__)
    assert call(Package(Loader()), strided, strided, strided) == [(3, 1), (1, 4), (1, 4)]
