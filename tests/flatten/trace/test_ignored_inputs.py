"""What stands where the example had None."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.models import make_model
from yobx_flatten import (
    DecodeSizes,
    SpecMismatchError,
    decode_inputs,
    export_program,
    register,
    register_flattening_functions,
    unregister_class_flattening,
)

X = torch.ones(2, 3)


class Adds(torch.nn.Module):
    def forward(self, x, more=None):
        return x if more is None else x + more


@dataclasses.dataclass
class Batch:
    x: Any
    more: Any = None


class AddsField(torch.nn.Module):
    def forward(self, batch):
        return batch.x if batch.more is None else batch.x + batch.more


def test_a_mask_in_the_place_of_none_is_refused():
    """The program has no mask: it would compute as if nothing were padded."""
    model = make_model("llama")
    exported = export_program(model, (), {**decode_inputs(model, DecodeSizes()), "attention_mask": None}, cases=[])
    padded = decode_inputs(model, DecodeSizes(padding=3))
    with pytest.raises(
        SpecMismatchError, match=r"kwargs\['attention_mask'\] was None when .* ignore a tensor of shape"
    ):
        exported(**padded)
    with torch.no_grad():
        found = exported(**{**decode_inputs(model, DecodeSizes(padding=3)), "attention_mask": None}).logits
        inputs = {**decode_inputs(model, DecodeSizes(padding=3)), "attention_mask": None}
        torch.testing.assert_close(found, model(**inputs).logits)


@pytest.mark.parametrize(
    ("args", "kwargs", "called", "place"),
    [
        ((X, None), {}, ((X, X), {}), r"args\[1\]"),
        ((X,), {"more": None}, ((X,), {"more": X}), r"kwargs\['more'\]"),
        ((X,), {"more": None}, ((X,), {"more": 3}), r"kwargs\['more'\] .* the int 3"),
    ],
)
def test_a_program_that_is_called_directly_refuses_it(args, kwargs, called, place):
    with register_flattening_functions():
        program = torch.export.export(Adds(), args, kwargs)
    for module in (program.module(), program.run_decompositions().module()):
        assert torch.equal(module(*args, **kwargs), X)
        with pytest.raises(SpecMismatchError, match=place):
            module(*called[0], **called[1])


def test_a_field_of_a_registered_class_counts_like_an_argument(tmp_path):
    """As torch's `register_dataclass` refuses it; also when the program was stored in between."""
    register(Batch)
    try:
        exported = export_program(AddsField(), (Batch(X),), cases=[])
        exported.save(tmp_path / "batch.pt2")
        with register_flattening_functions():
            loaded = torch.export.load(tmp_path / "batch.pt2").module()
        for call in (exported, exported.program.module(), loaded):
            assert torch.equal(call(Batch(X)), X)
            with pytest.raises(SpecMismatchError, match=r"args\[0\]\.more was None"):
                call(Batch(X, X))
    finally:
        unregister_class_flattening(Batch)


def test_a_program_with_none_is_exported_again():
    """The hook does not stand in the way of a trace, strict or not.

    In torch 2.11, dynamo takes no module that has hooks where an input is ``None``, whatever the hooks do.
    """
    with register_flattening_functions():
        program = torch.export.export(Adds(), (X,), {"more": None})
        for strict in (False, True) if torch.__version__ >= (2, 13) else (False,):
            again = torch.export.export(program.module(), (X,), {"more": None}, strict=strict)
            assert torch.equal(again.module()(X, more=None), X)
