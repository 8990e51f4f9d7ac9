"""Programs of a block explain themselves, equal dimensions stay apart, gradients flow, and all is put back."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import onnxruntime
import pytest
import torch
import torch.fx.experimental._config as fx_config
import transformers.cache_utils as cache_utils
import transformers.masking_utils as masking_utils
from torch.export import Dim, ExportedProgram, export  # imported before any block is open, as users do
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.flatten.pair import Pair
from tests.modules import module_class, module_of
from yobx_flatten import dynamic_shapes, make_dynamic_cache, make_flattening_function_for_dataclass
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import NotRegisteredError, SpecMismatchError

BLOCK_LINE = "with register_flattening_functions(patch_transformers=True): ..."


class OneStep(torch.nn.Module):
    def forward(self, x, cache):
        total = x.sum()
        for index in range(len(cache.layers)):
            keys, values = cache.update(x, x, index)
            total = total + keys.sum() + 2 * values.sum()
        return total, cache


AddPair = module_class("AddPair", lambda self, pair: pair.a + pair.b)


def tokens(batch=2, count=1, seed=0):
    return torch.randn(batch, 2, count, 4, generator=torch.Generator().manual_seed(seed))


def cache_of(layers=2, batch=2, length=3, window=None):
    pairs = [(tokens(batch, length, 10 + i), tokens(batch, length, 20 + i)) for i in range(layers)]
    if window is None:
        return make_dynamic_cache(pairs)
    classes = ["DynamicLayer"] * (layers - 1) + ["DynamicSlidingWindowLayer"]
    return make_dynamic_cache(pairs, classes, [{}] * (layers - 1) + [{"sliding_window": window}])


@pytest.fixture(scope="module")
def program():
    with register_flattening_functions(patch_transformers=True):
        shapes = ({0: Dim.AUTO}, [{0: Dim.AUTO, 2: Dim.AUTO}] * 4)
        return export(OneStep(), (tokens(), cache_of()), dynamic_shapes=shapes)


def run(program, x, cache):
    with register_flattening_functions(patch_transformers=True):
        return program.module()(x, cache)


def test_a_program_called_inside_a_block_is_right_and_outside_it_names_the_class_and_the_line(program):
    expected, _ = OneStep()(tokens(3, seed=5), cache_of(batch=3, length=6))
    for one in (program, copy.deepcopy(program)):
        found, cache = run(one, tokens(3, seed=5), cache_of(batch=3, length=6))
        torch.testing.assert_close(found, expected)
        assert (type(cache), cache.get_seq_length()) == (DynamicCache, 7)
    with register_flattening_functions(patch_transformers=True):
        module, decomposed = program.module(), program.run_decompositions()
        for one in (copy.deepcopy(module), decomposed.module()):
            torch.testing.assert_close(one(tokens(), cache_of())[0], OneStep()(tokens(), cache_of())[0])
    for made in (program.module, lambda: module, copy.deepcopy(program).module, decomposed.module):
        with pytest.raises(NotRegisteredError) as caught:
            made()(tokens(), cache_of())
        assert str(caught.value) == (
            "This program takes or returns DynamicCache, for which no registration with torch is active. Call the "
            f"program while the class is registered:\n    {BLOCK_LINE}"
        )
    with pytest.raises(NotRegisteredError) as caught:
        program.run_decompositions()
    assert BLOCK_LINE in str(caught.value)


def test_a_class_of_the_user_is_explained_with_her_call():
    register_class_flattening(Pair, lambda p: ([p.a, p.b], None), lambda children, static: Pair(*children), None)
    try:
        with register_flattening_functions():
            program = export(AddPair(), (Pair(torch.ones(2), torch.ones(2)),))
        total = program.module()(Pair(torch.ones(2), torch.ones(2)))
    finally:
        unregister_class_flattening(Pair)
    assert total.tolist() == [2, 2]
    with pytest.raises(NotRegisteredError, match=r"returns Pair, .*\n    register_class_flattening\(Pair, \.\.\.\)"):
        program.module()(Pair(torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (lambda: cache_of(layers=1), "key_1"),
        (lambda: cache_of(window=8), "key_W8_1"),
        (lambda: {"not": "a cache"}, "DynamicCache"),
    ],
    ids=["fewer layers", "another kind of layer", "another class"],
)
def test_inputs_of_another_structure_are_refused(program, cache, named):
    with pytest.raises((SpecMismatchError, ValueError)) as caught:
        run(program, tokens(), cache())
    assert named in str(caught.value)


class Watching(OneStep):
    def __init__(self, watch):
        super().__init__()
        seen = []
        self.watch = lambda: seen.append(watch())
        self.answers = lambda: seen

    def forward(self, x, cache=None):
        self.watch()
        return x if cache is None else super().forward(x, cache)


# transformers >= 5.17 keeps a tensor beside the window
HAS_WINDOW_TENSOR = "_sliding_window_tensor" in vars(DynamicSlidingWindowLayer(8))


def traced_attributes():
    return {
        f"{getattr(owner, '__name__', owner)}.{name}": vars(owner)[name]
        for owner, name in [
            (cache_utils.DynamicSlidingWindowLayer, "update"),
            (cache_utils.DynamicSlidingWindowLayer, "get_mask_sizes"),
            (cache_utils.DynamicSlidingWindowLayer, "lazy_initialization"),
            (cache_utils.DynamicSlidingWindowLayer, "__init__"),
            (cache_utils.DynamicLayer, "lazy_initialization"),
            (masking_utils, "prepare_padding_mask"),
            (masking_utils, "_ignore_causal_mask_sdpa"),
            (masking_utils, "_vmap_for_bhqkv"),
        ]
        if name in vars(owner) and not (name == "__init__" and not HAS_WINDOW_TENSOR)
    }


def traced_function():
    import torch.export._trace

    return vars(torch.export._trace)["_export"]


def test_every_replaced_attribute_is_back_after_an_export_also_one_that_failed():
    before, program_init, trace = traced_attributes(), vars(ExportedProgram)["__init__"], traced_function()
    watching = Watching(traced_attributes)
    with register_flattening_functions(patch_transformers=True):
        entered = traced_attributes()
        export(watching, (tokens(), cache_of(window=8)))
        left_trace = traced_attributes()
    assert before == entered == left_trace == traced_attributes()
    assert watching.answers()
    assert all(during.keys() == before.keys() for during in watching.answers())
    assert all(during[name] is not before[name] for during in watching.answers() for name in before)
    with pytest.raises(ZeroDivisionError), register_flattening_functions(patch_transformers=True):
        export(Watching(lambda: 1 / 0), (tokens(), cache_of(window=8)))
    assert traced_attributes() == before
    assert vars(ExportedProgram)["__init__"] is program_init
    assert traced_function() is trace
    assert fx_config.use_duck_shape is True


def test_a_function_kept_from_a_block_is_the_original_afterwards_and_an_export_in_another_thread_is_wrapped():
    """Who imported torch's export function inside a block may call it later: no dimension setting, no replacement."""
    with register_flattening_functions(patch_transformers=True):
        kept = traced_function()
    watching = Watching(lambda: (fx_config.use_duck_shape, vars(DynamicSlidingWindowLayer)["update"].__module__))
    kept(watching, (torch.ones(2),), strict=False)
    assert set(watching.answers()) == {(True, "transformers.cache_utils")}
    watching = Watching(lambda: fx_config.use_duck_shape)
    with register_flattening_functions(patch_transformers=True), ThreadPoolExecutor(1) as thread:
        thread.submit(export, watching, (tokens(), cache_of())).result()
    assert set(watching.answers()) == {False}


def test_the_caller_keeps_her_example_and_the_program_takes_contiguous_tensors():
    """A layer past its window holds slices; the program takes what everybody else passes."""
    cache = cache_of(window=8)
    strided = cache.layers[1].keys = cache.layers[1].keys.transpose(2, 3).contiguous().transpose(2, 3)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    with register_flattening_functions(patch_transformers=True):
        program = export(OneStep(), (tokens(), cache))
    holds = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert list(map(id, holds)) == list(map(id, held))
    assert not strided.is_contiguous()
    total, _ = run(program, tokens(seed=3), cache_of(window=8))
    torch.testing.assert_close(total, OneStep()(tokens(seed=3), cache_of(window=8))[0])


Weighs = module_class("Weighs", lambda self, x, more: x + 10 * more["y"][0] + 100 * more["z"])


@pytest.mark.parametrize("second", [1, 2], ids=["one tensor in three places", "two tensors"])
@pytest.mark.parametrize("number", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("strict", [False, True])
def test_a_tensor_in_two_places_is_two_inputs(second, number, strict):
    """torch 2.13 takes one object for one input: the program would read ``z`` for ``x``."""
    x = torch.ones(3, 4, dtype=number)
    args = x, {"y": [x if second == 1 else x * 2], "z": x}
    every = {0: Dim.AUTO}
    with register_flattening_functions():
        program = export(Weighs(), args, dynamic_shapes=(every, {"y": [every], "z": every}), strict=strict)
    others = [torch.arange(20).reshape(5, 4).to(number) + place for place in range(3)]
    given = others[0], {"y": [others[1]], "z": others[2]}
    assert torch.equal(program.module()(*given), Weighs()(*given))


def test_a_file_of_a_tensor_in_two_places_has_two_inputs():
    x, every = torch.ones(3, 4), {0: Dim.AUTO}
    kwargs, shapes = ({"x": one, "more": {"y": [one], "z": one}} for one in (x, every))
    with register_flattening_functions():
        options = {"dynamic_shapes": shapes, "dynamo": True, "verbose": False}
        written = torch.onnx.export(Weighs().eval(), (), kwargs=kwargs, **options)
    session = onnxruntime.InferenceSession(written.model_proto.SerializeToString())
    others = [torch.full((5, 4), float(value)) for value in (1, 2, 3)]
    feeds = {one.name: value.numpy() for one, value in zip(session.get_inputs(), others, strict=True)}
    expected = Weighs()(others[0], {"y": [others[1]], "z": others[2]})
    assert torch.equal(torch.from_numpy(session.run(None, feeds)[0]), expected)


WINDOW = 4


@dataclasses.dataclass
class Scored:
    scores: torch.Tensor
    past: object


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 4)

    def forward(self, scored):
        new = self.project(scored.scores)
        keys, values = scored.past.update(new, new * 2, 0)
        return {"loss": (keys * values).sum() + self.project(keys).mean(), "past": scored.past}


def inputs(batch, length):
    generator = torch.Generator().manual_seed(length)
    new, keys, values = (torch.randn(batch, 2, size, 4, generator=generator) for size in (2, length, length))
    keys.requires_grad_()
    cache = make_dynamic_cache([(keys, values)], "DynamicSlidingWindowLayer", {"sliding_window": WINDOW})
    return Scored(new, cache), keys


@pytest.fixture(autouse=True)
def registered():
    flatten, flatten_with_keys, unflatten = make_flattening_function_for_dataclass(Scored, set())
    register_class_flattening(Scored, flatten, unflatten, flatten_with_keys)
    yield
    unregister_class_flattening(Scored)


def gradients(module, scored, keys):
    module.zero_grad()
    module(scored)["loss"].backward()
    return [keys.grad, *(parameter.grad for parameter in module.parameters())]


def test_a_program_has_the_gradients_of_its_module():
    torch.manual_seed(0)
    module = Reader().train()
    with register_flattening_functions(patch_transformers=True):
        example, _ = inputs(2, 2)
        program = torch.export.export(module, (example,), dynamic_shapes=dynamic_shapes((example,)))
        trained = program.module()
        for batch, length in ((2, 2), (3, WINDOW - 1)):
            expected = gradients(module, *inputs(batch, length))
            torch.testing.assert_close(gradients(trained, *inputs(batch, length)), expected)
            assert all(gradient.abs().max() > 0 for gradient in expected)


class Attention(Reader):
    def forward(self, scored):
        new = self.project(scored.scores)
        keys, values = scored.past.update(new, new * 2, 0)
        found = torch.nn.functional.scaled_dot_product_attention(new, keys, values)
        return {"loss": found.square().mean()}


@pytest.mark.parametrize("reader", [Reader, Attention])
def test_one_graph_of_forward_and_backward_has_the_gradients_of_its_module(reader):
    experimental = pytest.importorskip("torch.export.experimental")
    torch.manual_seed(0)
    # the loss alone: torch's joint export takes no other output that has a gradient
    module = module_of(lambda self, scored: {"loss": self.reader(scored)["loss"]}, reader=reader()).train()
    with register_flattening_functions(patch_transformers=True):
        example, _ = inputs(2, 2)
        program = torch.export.export(module, (example,), dynamic_shapes=dynamic_shapes((example,)))
        # with the kernel of the CPU torch 2.13 decomposes the forward, and leaves a backward that expects another one
        with sdpa_kernel(SDPBackend.MATH):
            joint = experimental._export_forward_backward(program)
        backward = joint.graph_signature.backward_signature
        assert backward.loss_output == joint.graph_signature.user_outputs[0]
        assert list(backward.gradients_to_parameters.values()) == list(dict(module.named_parameters()))
        for batch, length in ((2, 2), (3, WINDOW - 1)):
            scored, _ = inputs(batch, length)
            with torch.no_grad():
                loss, *found = joint.graph_module(*module.parameters(), *torch.utils._pytree.tree_leaves(scored))
            keys, *weights = gradients(module, *inputs(batch, length))
            torch.testing.assert_close(loss, module(scored)["loss"])
            torch.testing.assert_close(found, [*weights, keys])
            assert all(gradient.abs().max() > 0 for gradient in found)
