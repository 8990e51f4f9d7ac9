"""The exporter's tables are read once, and each conversion has a copy of its own."""

import torch

from yobx_flatten.trace.onnx_operators import filled_registry, remembering_decompositions


class Table:
    read = 0

    def __init__(self, opset):
        self.opset, self.functions = opset, {"aten::relu": ["a function"]}

    @classmethod
    def from_torchlib(cls, opset=18):
        cls.read += 1
        return cls(opset)


def made(cls, *args, **kwargs):
    return filled_registry(vars(Table)["from_torchlib"], cls, args, kwargs)


def test_a_table_is_read_once_for_each_opset_and_changes_stay_with_who_made_them():
    """What one conversion adds to an operator, or adds an operator to, is not in the table of the next."""

    class Counted(Table):
        pass

    first = made(Counted)
    first.functions["aten::relu"].insert(0, "mine")
    first.functions["aten::tanh"] = ["mine"]
    assert made(Counted).functions == {"aten::relu": ["a function"]}
    assert Counted.read == 1
    assert [made(Counted, opset=23).opset, made(Counted, 23).opset, made(Counted).opset] == [23, 23, 18]
    assert Counted.read == 3


def test_a_table_is_read_again_when_a_library_has_defined_an_operator():
    """Its translation may be one of those that were left out before, as those of a library that is imported later."""

    class Counted(Table):
        pass

    made(Counted)
    library = torch.library.Library("yobx_flatten_test", "FRAGMENT")
    try:
        library.define("defined_later(Tensor x) -> Tensor")
        made(Counted)
        made(Counted)
        assert Counted.read == 2
    finally:
        library._destroy()


def described(table):
    """Some of the functions are made anew for each table, for an operator that they name."""
    return [(operator, getattr(function, "keywords", function)) for operator, function in table.items()]


def test_decompositions_are_those_of_the_exporter_and_read_once():
    from torch.onnx._internal.exporter._decomp import create_onnx_friendly_decomposition_table as original

    asked = []

    def counted(operators):
        asked.append(operators)
        return original(operators)

    create, aten = remembering_decompositions(counted), torch.ops.aten
    few, more = {aten.gelu.default}, {aten.gelu.default, aten.silu.default}
    expected = described(original(few))
    table = create(few)
    assert described(table) == expected
    del table[aten.silu.default]
    assert described(create(few)) == expected
    assert aten.silu.default not in create(more)
    assert asked == [few, more]


def test_decompositions_are_read_again_when_there_is_another():
    asked = []

    def counted(operators):
        asked.append(operators)
        return {}

    create = remembering_decompositions(counted)
    library = torch.library.Library("yobx_flatten_test", "FRAGMENT")
    try:
        create(set())
        library.define("decomposed_later(Tensor x) -> Tensor")
        create(set())
        library.impl("decomposed_later", torch.neg, "CompositeImplicitAutograd")
        create(set())
        create(set())
        assert len(asked) == 3
        operator = torch.ops.yobx_flatten_test.decomposed_later.default
        torch._decomp.register_decomposition(operator)(lambda x: -x)
        create(set())
        assert len(asked) == 4
        del torch._decomp.decomposition_table[operator]
    finally:
        library._destroy()
