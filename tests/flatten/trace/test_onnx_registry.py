"""The exporter's table of translations is read once, and each conversion has a copy of its own."""

import torch

from yobx_flatten.trace.onnx_registry import filled_registry


class Table:
    """Stands in for torch's ``ONNXRegistry``; it counts how often it is read."""

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
