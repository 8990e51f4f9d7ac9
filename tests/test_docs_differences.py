"""What the page of PyTorch and JAX states in addition to their programs, which tests/test_docs_guide.py runs."""

import re
from pathlib import Path

import pytest

from tests import fresh_process

GUIDE = Path(__file__).parent.parent / "docs" / "guide"


def fresh(code):
    return fresh_process.run("-c", code).stdout


def test_every_section_has_a_program_that_prints():
    sections = re.split(r"^## ", (GUIDE / "torch_and_jax.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    without = [text.splitlines()[0] for text in sections if "```python" not in text or "```text" not in text]
    assert not without


def test_torch_hands_unflatten_a_list_and_jax_a_tuple():
    pytest.importorskip("jax", reason="one of the two")
    assert (
        fresh(
            "import jax, torch.utils._pytree as pytree\n"
            "class Node: pass\n"
            "kinds = []\n"
            "pytree.register_pytree_node(Node, lambda n: ([1], None), lambda c, s: kinds.append(type(c)))\n"
            "jax.tree_util.register_pytree_node(Node, lambda n: ([1], None), lambda s, c: kinds.append(type(c)))\n"
            "pytree.tree_map(lambda x: x, Node()); jax.tree.map(lambda x: x, Node())\n"
            "print(*(kind.__name__ for kind in kinds))\n"
        )
        == "list tuple\n"
    )


def test_optree_and_jax_pickle_their_specs():
    pytest.importorskip("jax", reason="one of the two")
    pytest.importorskip("optree", reason="the other one")
    assert (
        fresh(
            "import jax, optree, pickle, torch.utils._pytree as pytree\n"
            "for structure in (jax.tree.structure, optree.tree_structure):\n"
            "    print(pickle.loads(pickle.dumps(structure([1, {'a': 2}]))) == structure([1, {'a': 2}]))\n"
            "print(pytree.treespec_dumps(pytree.tree_structure([1]))[:4])\n"
        )
        == "True\nTrue\n[1, \n"
    )


def test_torch_does_not_look_at_what_is_registered_for_a_named_tuple():
    """Its own way of taking named tuples apart comes first."""
    assert (
        fresh(
            "import collections, torch.utils._pytree as pytree\n"
            "Point = collections.namedtuple('Point', 'x y')\n"
            "pytree.register_pytree_node(Point, lambda p: ([p.x], p.y), lambda c, y: Point(*c, y))\n"
            "print(pytree.tree_leaves(Point(1, 2)))\n"
        )
        == "[1, 2]\n"
    )


def test_a_named_tuple_is_saved_under_the_name_that_torch_is_given():
    assert (
        fresh(
            "import collections, torch.utils._pytree as pytree\n"
            "Point = collections.namedtuple('Point', 'x y')\n"
            "spec = pytree.tree_structure(Point(1, 2))\n"
            "try:\n    pytree.treespec_dumps(spec)\n"
            "except NotImplementedError:\n    print('no name')\n"
            "pytree._register_namedtuple(Point, serialized_type_name='a.Point')\n"
            "print(pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec)\n"
        )
        == "no name\nTrue\n"
    )
