"""Ours inside the block, theirs outside: by identity and in place, whatever happens and in whichever thread."""

import contextlib
import itertools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from tests import registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.registry.stepping import SteppingThread
from yobx_flatten import (
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)
from yobx_flatten.errors import NotRegisteredError
from yobx_flatten.registry.torch_cpp import TorchCpp
from yobx_flatten.registry.torch_fx import TorchFx
from yobx_flatten.registry.torch_python import TorchPython

pytest.importorskip("transformers")

import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache

CACHES = (DynamicCache, StaticCache, EncoderDecoderCache)


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


def flatten(pair):
    return [pair.a, pair.b], None


def unflatten(children, static):
    return Pair(*children)


def in_force(cls=DynamicCache):
    """The flatten function that torch would call."""
    node = pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else node.flatten_fn


def changes_since(before):
    return registry_snapshot.differences(before, registry_snapshot.take())


def block():
    return register_flattening_functions(patch_transformers=True)


def enter():
    """An open block, to be left by `unregister_cache_flattening` at any time, in any thread."""
    return register_cache_flattening(patch_transformers=True)


def everything_patched():
    """The attributes that a block or a trace replaces, by identity."""
    import torch.export._trace

    return [
        vars(ExportedProgram)["__init__"],
        vars(torch.export._trace)["_export"],
        vars(DynamicSlidingWindowLayer)["update"],
        vars(DynamicSlidingWindowLayer)["get_mask_sizes"],
        vars(DynamicLayer)["lazy_initialization"],
        *sys.meta_path,
        fx_config.use_duck_shape,
    ]


@pytest.fixture
def left_as_found():
    """All tables and all patched attributes; the test fails if they differ at its end."""
    tables, patched = registry_snapshot.take(), everything_patched()
    yield
    assert changes_since(tables) == []
    assert [a is b for a, b in zip(patched, everything_patched(), strict=True)] == [True] * len(patched)


@pytest.fixture(params=["named", "unnamed", "with a rule of torch.fx"])
def registered_by_others(request):
    """`DynamicCache` registered through torch's public functions, and a class after it."""
    with other_libraries.forgotten_afterwards(DynamicCache, Pair):
        name = None if request.param == "unnamed" else "theirs"
        other_libraries.register(DynamicCache, name=name, fx=request.param.endswith("fx"))
        yield


# Ours inside, theirs outside


def test_a_block_leaves_what_it_found(left_as_found):
    """Nobody had the caches; inside they come apart, afterwards nobody has them."""
    with block():
        inside = [in_force(cls) is not None for cls in CACHES]
    assert inside == [True, True, True]
    assert [in_force(cls) for cls in CACHES] == [None, None, None]


def test_theirs_step_back_for_the_block(registered_by_others, left_as_found):
    """Another library's functions are out of force inside, and back afterwards, in every library and in their place."""
    with block():
        assert in_force() is flatten_dynamic_cache
        assert fx_pytree.SUPPORTED_NODES[DynamicCache] is not other_libraries.their_fx_rule
    assert in_force() is other_libraries.their_flatten


def test_theirs_keep_their_place_among_later_classes(registered_by_others, left_as_found):
    """A class registered after theirs still stands after it."""
    other_libraries.register(Pair, name="later")
    before = registry_snapshot.take()
    with block():
        pass
    try:
        assert changes_since(before) == []
    finally:
        other_libraries.forget(Pair)


def test_the_executorch_registration_of_transformers_comes_back(left_as_found):
    """transformers' own `register_dynamic_cache_export_support`, with its rule for `torch.fx`."""
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    with other_libraries.forgotten_afterwards(DynamicCache):
        register_dynamic_cache_export_support()
        theirs, rule, before = in_force(), fx_pytree.SUPPORTED_NODES[DynamicCache], registry_snapshot.take()
        with block():
            inside, rule_inside = in_force(), fx_pytree.SUPPORTED_NODES[DynamicCache]
        assert inside is flatten_dynamic_cache
        assert rule_inside is not rule
        assert in_force() is theirs
        assert fx_pytree.SUPPORTED_NODES[DynamicCache] is rule
        assert changes_since(before) == []


def test_a_registration_made_by_others_inside_stays(left_as_found):
    """A class that a library registers inside the block is still registered afterwards."""
    with other_libraries.forgotten_afterwards(Pair):
        with block():
            other_libraries.register(Pair, fx=True)
        assert in_force(Pair) is other_libraries.their_flatten
        assert fx_pytree.SUPPORTED_NODES[Pair] is other_libraries.their_fx_rule


def test_a_class_that_the_user_registered_keeps_her_functions(left_as_found):
    """Before, inside and after the block her functions are in force."""
    seen = []
    register_class_flattening(DynamicCache, flatten, unflatten, None)
    seen.append(in_force() is flatten)
    with block() as undo:
        seen.append(in_force() is flatten)
    seen.append(in_force() is flatten)
    unregister_class_flattening(DynamicCache)
    assert seen == [True, True, True]
    assert undo[DynamicCache] is False


def test_the_user_may_let_go_of_her_class_inside(left_as_found):
    """The block did not take it and does not give it back."""
    register_class_flattening(DynamicCache, flatten, unflatten, None)
    with block():
        unregister_class_flattening(DynamicCache)
        assert in_force() is None


def test_a_class_registered_inside_by_the_user_stays(left_as_found):
    """Her registration ends when she says so."""
    with block():
        register_class_flattening(Pair, flatten, unflatten, None)
    stayed = pytree.tree_leaves(Pair(1, 2))
    unregister_class_flattening(Pair)
    assert stayed == [1, 2]


def test_a_class_registered_before_may_be_unregistered_inside(left_as_found):
    """The block has no say in classes that it does not know."""
    register_class_flattening(Pair, flatten, unflatten, None)
    with block():
        unregister_class_flattening(Pair)
        assert in_force(Pair) is None


def test_a_model_output_defined_inside_stays_registered():
    """transformers registers the class when it is made, and never again."""
    from transformers.utils import ModelOutput

    # by hand: `forgotten_afterwards` needs the class, which does not exist yet
    with block():
        local = types.new_class("LocalOutput", (ModelOutput,))
    shared = pytree.SUPPORTED_SERIALIZED_TYPES[local].serialized_type_name
    try:
        assert in_force(local) is not None
        assert pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[shared] is local
    finally:
        other_libraries.forget(local)


def test_a_class_taken_away_inside_by_torch_comes_back(registered_by_others):
    """torch's own deregistration inside the block takes ours; theirs come back all the same."""
    with block():
        pytree._deregister_pytree_node(DynamicCache)
    assert in_force() is other_libraries.their_flatten


# Something goes wrong


class SomethingWrongError(Exception):
    pass


@pytest.mark.parametrize("error", [SomethingWrongError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_inside_is_passed_on_and_all_is_put_back(left_as_found, error):
    """The block swallows nothing and leaves nothing."""
    with pytest.raises(error), block():
        raise error
    assert in_force() is None


@pytest.mark.parametrize("backend", [TorchPython, TorchCpp, TorchFx])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_failure_while_entering_leaves_nothing(left_as_found, monkeypatch, backend, count):
    """Whichever library refuses whichever class, the classes before it are let go."""
    write, calls = backend.write, itertools.count(1)

    def refuse_one(self, recipe):
        if next(calls) == count:
            raise SomethingWrongError
        write(self, recipe)

    with monkeypatch.context() as patched:
        patched.setattr(backend, "write", refuse_one)
        with pytest.raises(SomethingWrongError):
            enter()
    assert [in_force(cls) for cls in CACHES] == [None, None, None]


@pytest.mark.parametrize("backend", [TorchPython, TorchCpp, TorchFx])
def test_a_failure_while_entering_brings_theirs_back(registered_by_others, left_as_found, monkeypatch, backend):
    """The class that was taken over first goes back to the other library."""
    write, calls = backend.write, itertools.count(1)

    def refuse_second(self, recipe):
        if next(calls) == 2:
            raise SomethingWrongError
        write(self, recipe)

    with monkeypatch.context() as patched:
        patched.setattr(backend, "write", refuse_second)
        with pytest.raises(SomethingWrongError):
            enter()
    assert in_force() is other_libraries.their_flatten


def test_the_next_block_works_after_a_failure(left_as_found, monkeypatch):
    """Nothing remains claimed."""
    with monkeypatch.context() as patched:
        patched.setattr(TorchFx, "write", lambda self, recipe: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            enter()
    with block():
        assert in_force() is flatten_dynamic_cache


def test_a_block_opens_while_torch_is_still_importing_its_export_module(monkeypatch):
    """A block entered by what `import torch.export._trace` runs: there is nothing to wrap yet, and nothing fails."""
    tables, program_init, finders = registry_snapshot.take(), vars(ExportedProgram)["__init__"], list(sys.meta_path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch.export._trace", types.ModuleType("torch.export._trace"))
        try:
            with block():
                inside = in_force()
        finally:
            after = (changes_since(tables), vars(ExportedProgram)["__init__"] is program_init, sys.meta_path == finders)
    assert inside is flatten_dynamic_cache
    assert after == ([], True, True)


# Nested, again, and overlapping


def test_an_inner_block_leaves_the_outer_one_in_force(left_as_found):
    """Leaving an inner `with` block leaves the outer one in force."""
    with block():
        with block():
            pass
        assert in_force() is flatten_dynamic_cache
    assert in_force() is None


def test_an_exception_in_an_inner_block_leaves_the_outer_one_in_force(left_as_found):
    """The inner one is left by an exception that the outer one does not see."""
    with block():
        with contextlib.suppress(SomethingWrongError), block():
            raise SomethingWrongError
        assert in_force() is flatten_dynamic_cache


def test_blocks_can_be_opened_again_and_again(left_as_found):
    """The tenth block is as good as the first."""
    seen = []
    for _ in range(10):
        with block():
            seen.append(in_force() is flatten_dynamic_cache)
        seen.append(in_force())
    assert seen == [True, None] * 10


def test_blocks_with_other_options_may_be_nested(left_as_found):
    """An inner block without transformers does not take them away."""
    with block(), register_flattening_functions():
        assert in_force() is flatten_dynamic_cache


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_be_left_in_any_order(registered_by_others, left_as_found, order):
    """Ours are in force until the last of three is left; then theirs are back."""
    undos, seen = [enter() for _ in range(3)], []
    for index in order:
        unregister_cache_flattening(undos[index])
        seen.append(in_force())
    assert seen == [flatten_dynamic_cache, flatten_dynamic_cache, other_libraries.their_flatten]


# A in, B in, then out in one order or the other; or one after the other.
OVERLAPS = ["A+ B+ A- B-", "A+ B+ B- A-", "A+ A- B+ B-", "A+ B+ A- A+ B- A-"]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_blocks_of_two_threads_may_overlap(registered_by_others, left_as_found, overlap):
    """Each thread finds ours in force inside its block; theirs are back when the last one left."""
    with SteppingThread() as a, SteppingThread() as b:
        threads, blocks, seen = {"A": a, "B": b}, {}, []
        for thread, way in overlap.split():
            if way == "+":
                blocks[thread] = block()
                threads[thread].do(blocks[thread].__enter__)
            else:
                seen.append(threads[thread].do(in_force))
                threads[thread].do(blocks[thread].__exit__, None, None, None)
    assert set(seen) == {flatten_dynamic_cache}
    assert in_force() is other_libraries.their_flatten


def test_a_block_may_be_undone_in_another_thread(left_as_found):
    """What one thread registered another may undo."""
    with SteppingThread() as a, SteppingThread() as b:
        undo = a.do(enter)
        inside = in_force()
        b.do(unregister_cache_flattening, undo)
    assert inside is flatten_dynamic_cache
    assert in_force() is None


def test_undoing_twice_is_harmless(left_as_found):
    """The second time there is nothing to do, also while another block is open."""
    first, second = enter(), enter()
    unregister_cache_flattening(first)
    unregister_cache_flattening(first)
    inside = in_force()
    unregister_cache_flattening(second)
    assert inside is flatten_dynamic_cache
    assert in_force() is None


def test_many_threads_at_once_leave_what_they_found(registered_by_others, left_as_found):
    """Eight threads enter and leave as fast as they can; inside, each finds ours in force."""

    def enter_and_leave():
        for _ in range(20):
            with block():
                if in_force() is not flatten_dynamic_cache:
                    return "theirs were in force inside"
        return "fine"

    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(SteppingThread()) for _ in range(8)]
        for thread in threads:
            thread._steps.put((enter_and_leave, ()))
        answers = [thread._results.get(timeout=60) for thread in threads]
    assert answers == [("fine", None)] * 8
    assert in_force() is other_libraries.their_flatten


# Models that run eagerly


# transformers < 5.17 asks for the positions of the new tokens, later versions for their number
TAKES_POSITIONS = "cache_position" in DynamicLayer.get_mask_sizes.__code__.co_varnames


class Attention(torch.nn.Module):
    """Two layers of attention over a cache, one of them sliding."""

    def forward(self, x, cache):
        for index, layer in enumerate(cache.layers):
            new = x.shape[-2]
            if TAKES_POSITIONS:
                new = torch.arange(layer.get_seq_length(), layer.get_seq_length() + new)
            length, offset = layer.get_mask_sizes(new)
            keys, values = cache.update(x, 2 * x, index)
            x = torch.nn.functional.scaled_dot_product_attention(x, keys, values) * (length + offset)
        return x


def generated():
    """Twelve steps with a window of 8, the first of them on three tokens."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 2, 3, 4, generator=generator)
    layers = ["DynamicLayer", "DynamicSlidingWindowLayer"]
    cache = make_dynamic_cache([(start, start)] * 2, layers, [{}, {"sliding_window": 8}])
    outputs = []
    for _ in range(12):
        outputs.append(Attention()(torch.randn(1, 2, 1, 4, generator=generator), cache))
    return torch.cat(outputs)


def test_a_model_runs_inside_as_outside(left_as_found):
    """Eagerly the same bits, below the window and past it: replacements are for traces."""
    outside = generated()
    with block():
        inside = generated()
    assert torch.equal(inside, outside)


def test_a_block_replaces_no_method_of_a_cache(left_as_found):
    """Before a trace begins, every method is the original."""
    before = [vars(cls).copy() for cls in (DynamicLayer, DynamicSlidingWindowLayer, DynamicCache)]
    with block():
        inside = [vars(cls).copy() for cls in (DynamicLayer, DynamicSlidingWindowLayer, DynamicCache)]
    assert inside == before


# What is imported when: each in a process where nothing is imported yet.

PRELUDE = """
import sys
import torch
import torch.utils._pytree as pytree
from tests import registry_snapshot
from tests.flatten import other_libraries
from yobx_flatten import register_class_flattening, register_flattening_functions, unregister_class_flattening

class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

def flatten(pair):
    return [pair.a, pair.b], None

def unflatten(children, static):
    return Pair(*children)

def block():
    return register_flattening_functions(patch_transformers=True)

def changes():
    return registry_snapshot.differences(before, registry_snapshot.take())

def compiled(*args):
    return torch.compile(lambda pair: pair[0] + pair[1], backend="eager")(args).tolist()
"""


def in_a_fresh_process(program):
    """What the program prints, line by line."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_first_block_imports_only_what_it_needs():
    """No model, no model output, no dynamo: a block that only flattens costs what the caches cost."""
    program = """
if VERSION < (5, 17):  # there the caches themselves import optree
    import transformers.cache_utils
before = set(sys.modules)
with block():
    from transformers import DynamicCache
    print(pytree.SUPPORTED_NODES[DynamicCache].flatten_fn.__name__)
new = set(sys.modules) - before
heavy = ("transformers.models", "transformers.modeling_outputs", "transformers.modeling_utils", "torch._dynamo",
         "torch.export._trace", "torch.onnx._internal.exporter", "optree", "torch.utils._cxx_pytree", "onnx", "jax")
# transformers 5.17 puts names of its former "fast" image processors into sys.modules, without loading them
print(sorted(name for name in new if name.startswith(heavy) and not name.endswith("_fast")))
"""
    program = program.replace("VERSION", str(tuple(map(int, transformers.__version__.split(".")[:2]))))
    assert in_a_fresh_process(program) == ["flatten_dynamic_cache", "[]"]


def test_the_cpp_pytree_may_be_imported_inside_the_block():
    """Theirs and ours were pending; afterwards theirs are in optree, ours nowhere, and `torch.compile` works."""
    pytest.importorskip("optree")
    program = """
from transformers import DynamicCache, StaticCache
other_libraries.register(DynamicCache)
other_libraries.register(Pair)
before = registry_snapshot.take()
with block():
    import torch.utils._cxx_pytree as cxx
    registry = sys.modules["optree.registry"]._NODETYPE_REGISTRY
    print(registry["torch", DynamicCache].flatten_func.__name__, ("torch", StaticCache) in registry)
print(registry["torch", DynamicCache].flatten_func.__name__, ("torch", StaticCache) in registry)
print(cxx.tree_unflatten([], cxx.tree_structure(Pair(1, 2))).b)
tables = registry_snapshot.take().tables[registry_snapshot.OPTREE]
print([entry.cls.__name__ for entry in tables if entry.cls in (DynamicCache, Pair)])
print(changes())
print(compiled(torch.ones(1), torch.ones(1)))
with block():
    pass
print(changes())
"""
    assert in_a_fresh_process(program) == [
        "flatten_dynamic_cache True",
        "their_flatten False",
        "2",
        "['DynamicCache', 'Pair']",
        "[]",
        "[2.0]",
        "[]",
    ]


def test_the_cpp_pytree_may_be_imported_after_the_block():
    """A class that came, went and came again waits once, and `torch.compile` works; a class that went stays away."""
    pytest.importorskip("optree")
    program = """
before = registry_snapshot.take()
for _ in range(2):
    register_class_flattening(Pair, flatten, unflatten, None)
    with block():
        pass
    unregister_class_flattening(Pair)
print(changes())
register_class_flattening(Pair, flatten, unflatten, None)
print(compiled(torch.ones(1), torch.ones(1)))
import torch.utils._cxx_pytree as cxx
from transformers import DynamicCache
registry = sys.modules["optree.registry"]._NODETYPE_REGISTRY
print(cxx.tree_leaves(Pair(1, 2)), ("torch", DynamicCache) in registry)
unregister_class_flattening(Pair)
print(len(cxx.tree_leaves(Pair(1, 2))), pytree._cxx_pytree_pending_imports)
print(changes())
"""
    assert in_a_fresh_process(program) == ["[]", "[2.0]", "[1, 2] False", "1 []", "[]"]


def test_the_export_module_may_be_imported_inside_the_block():
    """The first export of the process runs in a block: it is wrapped, and the module is as torch made it afterwards."""
    program = """
import torch.fx.experimental._config as fx_config
from torch.export import Dim, ExportedProgram, export
program_init = vars(ExportedProgram)["__init__"]

class Add(torch.nn.Module):
    def forward(self, x, y):
        print("while traced:", fx_config.use_duck_shape)
        return x.sum() + y.sum()

with block():
    print("torch.export._trace" in sys.modules)
    program = export(Add(), (torch.ones(3), torch.ones(3)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    trace = sys.modules["torch.export._trace"]
    print("yobx_flatten" in trace._export.__code__.co_filename)
print(program.module()(torch.ones(2), torch.ones(5)).item())
print("yobx_flatten" in trace._export.__code__.co_filename)
print(vars(ExportedProgram)["__init__"] is program_init, fx_config.use_duck_shape)
print([finder for finder in sys.meta_path if type(finder).__module__.startswith("yobx_flatten")])
print([name for name, value in vars(trace.__spec__.loader).items() if callable(value)])
"""
    assert in_a_fresh_process(program) == [
        "False",
        "while traced: False",
        "True",
        "7.0",
        "False",
        "True True",
        "[]",
        "[]",
    ]


def test_unregistering_twice_says_so_and_the_block_goes_on(left_as_found):
    """An error of the user inside the block costs nobody else anything."""
    with block():
        with pytest.raises(NotRegisteredError):
            unregister_class_flattening(Pair)
        assert in_force() is flatten_dynamic_cache
