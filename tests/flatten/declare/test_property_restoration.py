"""Any sequence of blocks, registrations, imports and failures ends in the state in which it began."""

import contextlib
import itertools

import pytest
import torch.utils._pytree as pytree
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from tests import fresh_process, registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.declare.blocks import everything_patched
from tests.flatten.registry.stepping import SteppingThread
from yobx_flatten import (
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)
from yobx_flatten.errors import AlreadyRegisteredError, NotRegisteredError
from yobx_flatten.huggingface.tracing.support import TRANSFORMERS_TRACING
from yobx_flatten.registry.claims import Registry

THREADS = 3


First, Second, Third = (type(name, (), {}) for name in ("First", "Second", "Third"))
BY_OTHERS = (Second, DynamicCache, StaticCache, Third)  # others may hold these from the start
ALL = (First, Second, Third, DynamicCache, StaticCache)

threads = st.integers(0, THREADS - 1)
classes = st.sampled_from((First, Second, DynamicCache))
operations = st.one_of(
    st.tuples(st.just("enter"), threads),
    st.tuples(st.just("leave"), threads),
    st.tuples(st.just("raise"), threads),
    st.tuples(st.just("fail to enter"), threads, st.integers(1, 3)),
    st.tuples(st.just("put in force"), threads),
    st.tuples(st.just("undo"), threads, st.integers(0, 5)),
    st.tuples(st.just("register"), threads, classes, st.integers(0, 1)),
    st.tuples(st.just("fail to register"), threads, classes),
    st.tuples(st.just("unregister"), threads, classes),
    st.tuples(st.just("start a trace"), threads),
    st.tuples(st.just("end a trace"), threads),
)


FUNCTIONS = [
    (lambda obj: ([], 0), lambda children, static: None, lambda obj: ([], 0)),
    (lambda obj: ([], 1), lambda children, static: None, lambda obj: ([], 1)),
]


class DrawnError(Exception):
    pass


def raise_drawn_error(*args):
    raise DrawnError


class Scene:
    def __init__(self, workers):
        self.workers = workers
        self.blocks = [[] for _ in workers]
        self.traces = [[] for _ in workers]
        self.undos = []
        self.hers = set()

    def run(self, operation):
        name, thread, *rest = operation
        getattr(self, name.replace(" ", "_"))(thread, *rest)

    def enter(self, thread):
        block = register_flattening_functions(patch_transformers=True)
        self.workers[thread].do(block.__enter__)
        self.blocks[thread].append(block)
        assert pytree.SUPPORTED_NODES[DynamicCache].flatten_fn is not other_libraries.their_flatten

    def leave(self, thread):
        if self.blocks[thread]:
            self.workers[thread].do(self.blocks[thread].pop().__exit__, None, None, None)

    def raise_(self, thread):
        if self.blocks[thread]:
            error = DrawnError()
            left = self.blocks[thread].pop()
            with contextlib.suppress(DrawnError):
                assert not self.workers[thread].do(left.__exit__, DrawnError, error, None)

    def fail_to_enter(self, thread, count):
        claim, calls = Registry.claim, itertools.count(1)

        def fail(registry, recipe):
            if next(calls) == count:
                raise DrawnError
            return claim(registry, recipe)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(Registry, "claim", fail)
            with pytest.raises(DrawnError):
                self.workers[thread].do(register_cache_flattening, True)

    def put_in_force(self, thread):
        self.undos.append(self.workers[thread].do(register_cache_flattening, True))

    def undo(self, thread, index):
        if index < len(self.undos):
            self.workers[thread].do(unregister_cache_flattening, self.undos[index])  # some of them for the second time

    def register(self, thread, cls, number):
        with contextlib.suppress(AlreadyRegisteredError):
            if self.workers[thread].do(register_class_flattening, cls, *FUNCTIONS[number]):
                self.hers.add(cls)
                assert pytree.SUPPORTED_NODES[cls].flatten_fn is FUNCTIONS[number][0]

    def fail_to_register(self, thread, cls):
        with contextlib.suppress(AlreadyRegisteredError, DrawnError):
            assert not self.workers[thread].do(register_class_flattening, cls, *FUNCTIONS[0], raise_drawn_error)

    def unregister(self, thread, cls):
        if cls in self.hers:
            self.hers.discard(cls)
            self.workers[thread].do(unregister_class_flattening, cls)
        else:
            with pytest.raises(NotRegisteredError):
                self.workers[thread].do(unregister_class_flattening, cls)

    def start_a_trace(self, thread):
        trace = TRANSFORMERS_TRACING.traceable()
        self.workers[thread].do(trace.__enter__)
        self.traces[thread].append(trace)

    def end_a_trace(self, thread):
        if self.traces[thread]:
            self.workers[thread].do(self.traces[thread].pop().__exit__, None, None, None)

    def end(self):
        for thread in reversed(range(THREADS)):
            while self.traces[thread]:
                self.end_a_trace(thread)
            while self.blocks[thread]:
                self.leave(thread)
        for undo in self.undos:
            unregister_cache_flattening(undo)
        for cls in sorted(self.hers, key=str):
            unregister_class_flattening(cls)


setattr(Scene, "raise", Scene.raise_)


@contextlib.contextmanager
def cpp_pytree(state):
    """torch's C++ pytree imported, or still to be imported: then torch keeps a list of pending classes."""
    found = pytree._cxx_pytree_imported
    pytree._cxx_pytree_imported = state == "imported"
    try:
        yield
    finally:
        pytree._cxx_pytree_imported = found


@pytest.mark.parametrize("state", ["imported", "pending"])
@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    by_others=st.lists(
        st.tuples(st.sampled_from(BY_OTHERS), st.booleans(), st.booleans()), unique_by=lambda drawn: drawn[0]
    ),
    steps=st.lists(operations, max_size=24),
)
def test_any_sequence_ends_where_it_began(state, by_others, steps):
    pytest.importorskip("torch.utils._cxx_pytree", reason="optree is not installed", exc_type=ImportError)
    with other_libraries.forgotten_afterwards(*ALL), cpp_pytree(state), contextlib.ExitStack() as stack:
        for cls, named, fx in by_others:
            other_libraries.register(cls, name=f"theirs.{cls.__name__}" if named else None, fx=fx)
        before, attributes = registry_snapshot.take(), everything_patched()
        scene = Scene([stack.enter_context(SteppingThread()) for _ in range(THREADS)])
        try:
            for step in steps:
                scene.run(step)
        finally:
            scene.end()
        assert registry_snapshot.differences(before, registry_snapshot.take()) == []
        assert [a is b for a, b in zip(attributes, everything_patched(), strict=True)] == [True] * len(attributes)


PRELUDE = """
import sys
import torch
import torch.utils._pytree as pytree
from tests import registry_snapshot
from tests.flatten import other_libraries
from tests.flatten.pair import Pair, flatten, unflatten
from yobx_flatten import register_class_flattening, register_flattening_functions, unregister_class_flattening

def block():
    return register_flattening_functions(patch_transformers=True)

def changes():
    return registry_snapshot.changes_since(before)

def compiled(*args):
    return torch.compile(lambda pair: pair[0] + pair[1], backend="eager")(args).tolist()
"""


def in_a_fresh_process(program):
    return fresh_process.run("-c", PRELUDE + program).stdout.splitlines()


def test_the_first_block_imports_only_what_it_needs():
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
        "flatten_dynamic_cache True", "their_flatten False", "2", "['DynamicCache', 'Pair']", "[]", "[2.0]", "[]",
    ]  # fmt: skip


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
        "False", "while traced: False", "True", "7.0", "False", "True True", "[]", "[]",
    ]  # fmt: skip
