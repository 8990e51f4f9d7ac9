"""Arguments that ``forward`` takes in its ``**kwargs``."""

import inspect

import pytest
import torch
from torch.export import Dim

from tests.models import make_model
from yobx_flatten import Case, DecodeSizes, InvalidArgumentError, decode_inputs, export_onnx, export_program

pytestmark = pytest.mark.slow

X = torch.ones(2, 3)
ROWS = {0: Dim.AUTO}


class Keeps(torch.nn.Module):
    def forward(self, x, **kwargs):
        more = kwargs.get("more")
        return x * 2 if more is None else x * 2 + more


def _other() -> list[Case]:
    return [Case("five rows", (), {"x": torch.ones(5, 3), "more": torch.ones(5, 3)})]


@pytest.mark.parametrize(
    "shapes",
    [
        "auto",
        {"x": ROWS, "more": ROWS},
        {"x": ROWS, "kwargs": {"more": ROWS}},
        {"x": ROWS, "**kwargs": {"more": ROWS}},
        None,
    ],
    ids=["auto", "given", "by its parameter", "as torch 2.15 calls it", "fixed"],
)
def test_they_vary_like_the_others(shapes):
    """torch.export alone takes fixed sizes only."""
    module = Keeps()
    cases = [] if shapes is None else _other()
    exported = export_program(module, (), {"x": X, "more": X}, dynamic_shapes=shapes, cases=cases)
    assert exported.report.ok
    assert torch.equal(exported(x=X, more=X), torch.full((2, 3), 3.0))
    assert "forward" not in vars(module)
    assert list(inspect.signature(module.forward).parameters) == ["x", "kwargs"]


def test_so_they_do_with_dynamo_and_in_an_onnx_file(tmp_path):
    assert export_program(Keeps(), (), {"x": X, "more": X}, strict=True, cases=_other()).report.ok
    report = export_onnx(Keeps(), (), {"x": X, "more": X}, path=tmp_path / "keeps.onnx", cases=_other()).report
    assert report.input_names == ["x", "more"]


def test_none_among_them_stays_none():
    assert export_program(Keeps(), (), {"x": X, "more": None}, cases=[]).report.ok


def test_transformers_reads_some_there():
    """Its models have no parameter for hidden states, and return them."""
    model = make_model("llama")
    report = export_program(model, (), {**decode_inputs(model, DecodeSizes()), "output_hidden_states": True}).report
    assert report.ok
    assert "hidden_states.0" in report.output_names


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"other": X}, r"Keeps.forward has no parameter 'other', and reads no such name from its \*\*kwargs. Its p"),
        ({"xs": X}, r"reads no such name from its \*\*kwargs\. Its parameters are x\. Did you mean 'x'\?"),
    ],
)
def test_a_tensor_that_is_not_read_is_refused(kwargs, message):
    with pytest.raises(InvalidArgumentError, match=message):
        export_program(Keeps(), (), {"x": X, **kwargs}, cases=[])


def test_a_misspelt_name_is_refused_before_the_trace():
    model = make_model("llama")
    with pytest.raises(InvalidArgumentError, match=r"no parameter 'use_cahce'.* Did you mean 'use_cache'\?"):
        export_program(model, (), {**decode_inputs(model, DecodeSizes()), "use_cahce": False})
