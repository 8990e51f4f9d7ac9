"""What a file states of its inputs: sizes that depend on each other, those that only an index shows among them."""

import re

import pytest
import torch

from yobx_flatten import (
    Case,
    InvalidArgumentError,
    ReplayError,
    export_program,
    prove_program,
    register_flattening_functions,
)
from yobx_flatten.export.exported_model import source_of
from yobx_flatten.export.flat_program import flat_program, signature_of
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.signature import Signature


class Masked(torch.nn.Module):
    """A mask that is read at the numbers of the rows, as masks of transformers are; rows in order of their sums.

    Models that see prepend entries for an image to the mask (GIT of transformers).
    """

    def __init__(self, image=0):
        super().__init__()
        self.image = image

    def forward(self, x, mask):
        rows = torch.arange(x.shape[0])[:, None]
        if self.image:
            mask = torch.cat([mask.new_ones(mask.shape[0], self.image), mask], dim=-1)
        padded = torch.nn.functional.pad(mask.to(torch.bool), (0, x.shape[1]))
        return (x * padded[rows, torch.arange(x.shape[1])[None]])[x.sum(1).sort()[1]]


@pytest.fixture(scope="module", params=[0, 5], ids=["text", "image"])
def signature(request):
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    given = {"x": torch.ones(2, 3), "mask": torch.ones(2, 4, dtype=torch.int64)}
    exported = export_program(Masked(request.param), (), given, dynamic_shapes={"x": free, "mask": free}, cases=[])
    return signature_of(source_of(exported).traced)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_mask_of_another_number_of_rows_is_refused(signature, rows):
    """torch raises `IndexError` for fewer rows, and OpenVINO would return numbers."""
    with pytest.raises(InvalidArgumentError, match=f"mask has size {rows} in axis 0, and the file takes 3 there"):
        signature.bind({"x": torch.ones(3, 5), "mask": torch.ones(rows, 5).long()}, InvalidArgumentError, "the file")


@pytest.mark.parametrize("columns", [1, 4, 9])
def test_a_mask_of_any_length_is_taken_where_it_is_padded(signature, columns):
    """Columns are padded before they are read, so that all of them are there."""
    given = {"x": torch.ones(3, 5), "mask": torch.ones(3, columns).long()}
    assert [tensor.shape for tensor in signature.bind(given, InvalidArgumentError, "the file")] == [
        (3, 5),
        (3, columns),
    ]


@pytest.mark.parametrize(("columns", "held"), [(5, 2), (9, 6), (10, 7), (30, 7)])
def test_a_sliding_cache_holds_what_the_mask_states(columns, held):
    sizes = [({"a": 1}, {"b": 1}), ({"a": 1}, {"c": 1}), ({"a": 1}, 2, {"d": 1}, 4)]
    key = "past_key_values.0.key"
    types = zip(("input_ids", "attention_mask", key), (torch.int64, torch.int64, torch.float32), sizes, strict=True)
    signature = Signature.from_json(Signature([*types], ["logits"], kept={key: 7}).to_json(), "the file")

    def bind(tokens):
        ids, mask = torch.zeros(1, 3).long(), torch.ones(1, columns).long()
        given = {"input_ids": ids, "attention_mask": mask, key: torch.ones(1, 2, tokens, 4)}
        return signature.bind(given, InvalidArgumentError, "the file")

    assert [tensor.shape[-2] for tensor in bind(held)] == [1, 1, held]
    with pytest.raises(InvalidArgumentError, match=f"{key} holds {held + 1} tokens, but the file needs {held} tok"):
        bind(held + 1)


class Positions(torch.nn.Module):
    """Positions that a mask states, as those of OPT: whatever its length is, there is one for each token."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(32, 4)

    def forward(self, input_ids, attention_mask, past_key_values):
        columns, new = attention_mask.shape[1], input_ids.shape[1]
        torch._check(columns == past_key_values.shape[1] + new)
        places = torch.arange(new) + (columns - new)
        return self.positions(attention_mask.cumsum(1).index_select(1, places)), past_key_values


def _call(rows, past, new, columns):
    return {
        "input_ids": torch.ones(rows, new, dtype=torch.int64),
        "attention_mask": torch.ones(rows, columns, dtype=torch.int64),
        "past_key_values": torch.zeros(rows, past, 4),
    }


@pytest.fixture(scope="module")
def positions():
    free = dict.fromkeys(
        ("input_ids", "attention_mask", "past_key_values"), dict.fromkeys((0, 1), torch.export.Dim.AUTO)
    )
    given = _call(2, 5, 3, 8)
    return export_program(Positions(), (), given, dynamic_shapes=free, cases=[Case("one", (), _call(1, 4, 1, 5))])


@pytest.mark.parametrize("columns", [7, 9])
def test_what_a_program_asserts_of_sizes_is_asked_of_a_file(positions, columns):
    """A mask that is one token short or long: torch raises, and a runtime without assertions would return numbers."""
    signature = signature_of(source_of(positions).traced)
    assert Signature.from_json(signature.to_json(), "the file") == signature
    assert signature.bind(_call(1, 7, 1, 8), InvalidArgumentError, "the file")
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        positions.program.module()(**_call(3, 5, 3, columns))
    with pytest.raises(InvalidArgumentError, match="do not fit each other") as caught:
        signature.bind(_call(3, 5, 3, columns), InvalidArgumentError, "the file")
    stated = {"attention_mask.shape[1]", "input_ids.shape[1]", "past_key_values.shape[1]", str(columns), "3", "5"}
    assert stated < set(re.split(r"[ .]*(?:needs| == | \+ |, but found |\.$) ?", str(caught.value)))


@pytest.mark.parametrize(("suffix", "runtime"), [(".xml", "openvino"), (".onnx", "openvino"), (".onnx", "onnxruntime")])
def test_a_runtime_refuses_sizes_that_the_program_refuses(positions, tmp_path, suffix, runtime):
    """Neither has assertions: both would take the positions of other tokens."""
    pytest.importorskip(runtime)
    path = tmp_path / f"positions{suffix}"
    (positions.to_onnx if suffix == ".onnx" else positions.to_openvino)(path)
    runner = open_runner(path, runtime=runtime)
    with torch.no_grad():
        expected, _ = source_of(positions).example.module(**_call(3, 5, 2, 7))
    torch.testing.assert_close(runner.run(_call(3, 5, 2, 7))[runner.outputs[0]], expected)
    with pytest.raises(ReplayError, match="do not fit each other"):
        runner.run(_call(3, 5, 2, 6))


def test_a_program_without_assertions_hands_its_guards_on():
    """torch.export makes guards unless it is asked to defer them: here the length is at most ten times the width."""

    class Narrow(torch.nn.Module):
        def forward(self, x, y):
            return x.sum() if x.shape[1] <= 10 * y.shape[0] else y.sum()

    free = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    given = (torch.ones(2, 3), torch.ones(4))
    with register_flattening_functions():
        program = torch.export.export(Narrow(), given, dynamic_shapes=free)
    signature = signature_of(source_of(prove_program(program, Narrow(), cases=[])).traced)
    assert signature.bind({"x": torch.ones(2, 40), "y": torch.ones(4)}, InvalidArgumentError, "the file")
    with pytest.raises(InvalidArgumentError, match=r"x.shape\[1\] <= 10 \* y.shape\[0\], but found 41 <= 10 \* 4"):
        signature.bind({"x": torch.ones(2, 41), "y": torch.ones(4)}, InvalidArgumentError, "the file")


def test_a_program_of_a_file_does_not_write_to_its_inputs():
    """A state that the model changes in place, through a view: the program returns it, and the caller's stays."""

    class Counts(torch.nn.Module):
        def forward(self, x, state):
            state.transpose(0, 1).copy_(state.transpose(0, 1) + x.sum())
            return state * 2, state

    given = {"x": torch.ones(2, 3), "state": torch.zeros(4, 2)}
    flat = flat_program(torch.export.export(Counts(), (), given))
    module, state = flat.module(), torch.full((4, 2), 5.0)
    doubled, after = module(torch.ones(2, 3), state)
    assert torch.equal(state, torch.full((4, 2), 5.0))
    assert torch.equal(after, torch.full((4, 2), 11.0))
    assert torch.equal(doubled, torch.full((4, 2), 22.0))


class Builtins(torch.nn.Module):
    """Its arguments are called as functions of Python are, like those of torchvision's models."""

    def forward(self, input, max):
        return input * max


def test_arguments_may_have_the_names_of_functions_of_python():
    """Their nodes get other names in a copy of the graph, and what lowers the program verifies that all agree."""
    given = {"input": torch.arange(6.0).reshape(2, 3), "max": torch.full((2, 3), 2.0)}
    program = flat_program(torch.export.export(Builtins(), (), given)).run_decompositions()
    (found,) = program.module()(*given.values())
    torch.testing.assert_close(found, given["input"] * 2)
