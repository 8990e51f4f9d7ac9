"""What is imported when, before, inside or after a block: each in a process where nothing is imported yet."""

import pytest
import transformers

from tests import fresh_process

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
