"""A trace reads the size of an attention off its arguments, and makes the program that torch's own steps make."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from matrix.models import make_model
from yobx_flatten import DecodeSizes, decode_inputs, register_flattening_functions
from yobx_flatten.export.example import make_example
from yobx_flatten.trace import trace_settings
from yobx_flatten.trace.trace_settings import PLAIN_ATTENTION

AUTO = torch.export.Dim.AUTO
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Attends(torch.nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, query, key, value, mask=None):
        return scaled_dot_product_attention(query, key, value, mask, **self.options) * 2


def described(program: torch.export.ExportedProgram) -> list[str]:
    values = [
        f"{node.name} {tuple(value.shape)} {value.stride()} {value.dtype}"
        for node in program.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return [program.graph_module.code, str(program.range_constraints), *values]


def traced(module: torch.nn.Module, args, kwargs, shapes) -> list[str]:
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        return described(torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False))


@pytest.fixture
def by_steps(monkeypatch):
    return lambda: monkeypatch.setattr(trace_settings, "_is_usual", lambda *given: False)


@pytest.fixture
def told(monkeypatch) -> list[int]:
    found: list[int] = []
    size = trace_settings._size
    monkeypatch.setattr(trace_settings, "_size", lambda *given: found.append(1) or size(*given))
    return found


def tensors(*sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size) for size in sizes)


CASES = {
    "all sizes vary": ({}, [(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 6), (2, 1, 3, 7)]),
    "no mask": ({}, [(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8)]),
    "a mask of two axes": ({}, [(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), (3, 7)]),
    "causal": ({"is_causal": True}, [(2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)]),
    "fewer heads of keys": ({"enable_gqa": True}, [(2, 4, 3, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 1, 3, 7)]),
    "a scale": ({"scale": 0.3}, [(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 3, 7)]),
    "one row of queries": ({}, [(1, 4, 3, 8), (5, 4, 7, 8), (5, 4, 7, 8)]),
    "a mask of more rows": ({}, [(1, 4, 3, 8), (1, 4, 7, 8), (1, 4, 7, 8), (5, 1, 3, 7)]),
    "three axes": ({}, [(4, 3, 8), (4, 7, 8), (4, 7, 8)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vary", [True, False])
def test_a_program_is_the_one_of_torchs_own_steps(case, vary, by_steps, told):
    options, sizes = CASES[case]
    args = tensors(*sizes)
    axes = [{i: AUTO for i, size in enumerate(one.shape) if size > 1 and i != 1} if vary else None for one in args]
    shapes = None if not vary else tuple(axes)
    if case == "a mask of two axes" and vary:
        shapes = (*shapes[:3], {0: AUTO, 1: AUTO})
    short = traced(Attends(**options), args, {}, shapes)
    assert bool(told) == (case != "three axes")
    by_steps()
    assert short == traced(Attends(**options), args, {}, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bart", "bert"])
def test_a_decoder_is_the_one_of_torchs_own_steps(name, by_steps, told):
    model = make_model(name)

    def program() -> list[str]:
        with register_flattening_functions(patch_transformers=True), torch.no_grad():
            example = make_example(model, (), decode_inputs(model, DecodeSizes()), "auto")
            kwargs, shapes = dict(example.kwargs), example.shapes
            return described(torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False))

    short = program()
    assert told
    by_steps()
    assert short == program()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(2, 4, 3, 8), (2, 4, 7, 6), (2, 4, 7, 6)], "queries of 8 numbers, and keys of 6"),
        ([(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 5, 8)], "7 keys, and 5 values"),
        ([(2, 4, 3, 8), (5, 4, 7, 8), (5, 4, 7, 8)], "2"),
        ([(2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8), (2, 1, 3, 6)], "6"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message, told):
    args = tensors(*sizes)
    with pytest.raises(RuntimeError, match=message):
        traced(Attends(), args, {}, None)
    assert told
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):  # the fused one takes 7 keys and 5 values
        Attends()(*args)


@pytest.mark.parametrize("mode", ["symbolic", "fake"])
def test_a_trace_of_the_steps_has_the_steps(mode, told):
    args = tensors((2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    shapes = tuple({0: AUTO, 2: AUTO} for _ in args)
    expected = Attends()(*args)
    with torch.no_grad():
        with PLAIN_ATTENTION:
            steps = make_fx(Attends(), tracing_mode=mode)(*args)
        assert not told
        with register_flattening_functions():
            program = torch.export.export(Attends(), args, dynamic_shapes=shapes, strict=False)
            decomposed = program.run_decompositions()
        torch.testing.assert_close(steps(*args), expected)
        torch.testing.assert_close(decomposed.module()(*args), expected)
    assert ATTENTION not in {node.target for node in (*steps.graph.nodes, *decomposed.graph.nodes)}


def test_gradients_other_types_and_the_trace_of_another_thread_take_the_steps(told):
    args = tensors((2, 4, 3, 8), (2, 4, 7, 8), (2, 4, 7, 8))
    with pytest.raises(RuntimeError, match="dtype"):
        traced(Attends(), (args[0], args[1].double(), args[2]), {}, None)
    with register_flattening_functions():
        torch.export.export(Attends(), tuple(one.clone().requires_grad_() for one in args), strict=False)
    shapes = tuple({0: AUTO, 2: AUTO} for _ in args)

    def other() -> torch.export.ExportedProgram:
        with torch.no_grad():
            return torch.export.export(Attends(), args, dynamic_shapes=shapes, strict=False)

    with PLAIN_ATTENTION, ThreadPoolExecutor(1) as thread:
        assert thread.submit(other).result()
    assert not told


def test_an_implementation_that_is_there_stays():
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def theirs(*args, **kwargs):
        return ATTENTION._op_dk(key, *args, **kwargs)

    ATTENTION.py_impl(key)(theirs)
    try:
        with PLAIN_ATTENTION:
            assert ATTENTION.py_kernels[key] is theirs
        assert ATTENTION.py_kernels[key] is theirs
    finally:
        del ATTENTION.py_kernels[key]
        ATTENTION._dispatch_cache.clear()
