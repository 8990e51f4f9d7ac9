"""What a file states of its inputs: sizes that depend on each other, those that only an index shows among them."""

import pytest
import torch

from yobx_flatten import InvalidArgumentError, export_program
from yobx_flatten.export.flat_program import flat_program, signature_of
from yobx_flatten.export.program import source_of
from yobx_flatten.runners.signature import Signature


class Masked(torch.nn.Module):
    """A mask that is read at the numbers of the rows, as masks of transformers are; rows in order of their sums."""

    def forward(self, x, mask):
        rows = torch.arange(x.shape[0])[:, None]
        padded = torch.nn.functional.pad(mask.to(torch.bool), (0, x.shape[1]))
        return (x * padded[rows, torch.arange(x.shape[1])[None]])[x.sum(1).sort()[1]]


@pytest.fixture(scope="module")
def signature():
    """Of a program for any number of rows and columns."""
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    given = {"x": torch.ones(2, 3), "mask": torch.ones(2, 4, dtype=torch.int64)}
    exported = export_program(Masked(), (), given, dynamic_shapes={"x": free, "mask": free}, cases=[])
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
    """A window of eight keeps seven tokens, and fewer before they were seen; the text of a file states it."""
    sizes = [({"a": 1}, {"b": 1}), ({"a": 1}, {"c": 1}), ({"a": 1}, 2, {"d": 1}, 4)]
    key = "past_key_values.0.key"
    types = zip(("input_ids", "attention_mask", key), (torch.int64, torch.int64, torch.float32), sizes, strict=True)
    signature = Signature.from_json(Signature([*types], ["logits"], kept={key: 7}).to_json(), "the file")

    def bind(tokens):
        ids, mask = torch.zeros(1, 3).long(), torch.ones(1, columns).long()
        given = {"input_ids": ids, "attention_mask": mask, key: torch.ones(1, 2, tokens, 4)}
        return signature.bind(given, InvalidArgumentError, "the file")

    assert [tensor.shape[-2] for tensor in bind(held)] == [1, 1, held]
    with pytest.raises(InvalidArgumentError, match=f"{key} holds {held + 1} tokens, and the file takes {held} there"):
        bind(held + 1)


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
