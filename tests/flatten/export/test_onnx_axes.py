"""The axes of a file have names that say what they are: those that tools use, or the user's own."""

import onnx
import pytest
import torch
from torch.export import Dim

from tests.flatten.export.exported_files import exported_file
from tests.models import make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    DynamicShapesError,
    ReplayError,
    decode_inputs,
    dynamic_shapes,
    export_onnx,
    export_program,
)

pytestmark = pytest.mark.slow


def _axes(path):
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_a_decoder_has_the_names_that_tools_know():
    """Rows have one name, also in the mask, which torch gives a symbol of its own."""
    axes = _axes(exported_file("llama").path)
    assert axes["input_ids"] == ["batch_size", "sequence_length"]
    assert axes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert axes["past_key_values.0.key"] == ["batch_size", 2, "past_sequence_length", 8]
    assert axes["past_key_values.1.value"] == ["batch_size", 2, "past_sequence_length", 8]
    assert axes["logits"] == ["batch_size", "kept_sequence_length", 96]
    assert axes["present.1.key"] == ["batch_size", 2, "total_sequence_length", 8]


def test_layers_that_slide_have_another_length():
    """They keep less than was seen: one name for both would be wrong."""
    axes = _axes(exported_file("gemma2").path)
    assert axes["past_key_values.0.key"][2] == "past_window_length"
    assert axes["past_key_values.1.key"][2] == "past_sequence_length"
    assert axes["present.0.key"][2] == "Min(7, past_window_length + sequence_length)"
    assert axes["present.1.key"][2] == "total_sequence_length"


def test_a_decoder_beside_an_encoder_has_the_names_of_both():
    axes = _axes(exported_file("t5").path)
    assert axes["decoder_input_ids"] == ["batch_size", "decoder_sequence_length"]
    assert axes["attention_mask"] == ["batch_size", "encoder_sequence_length"]
    assert axes["past_key_values.0.decoder.key"][2] == "past_decoder_sequence_length"
    assert axes["past_key_values.0.encoder.key"][2] == axes["attention_mask"][1]  # they are equal
    assert axes["present.0.decoder.key"][2] == "past_decoder_sequence_length + decoder_sequence_length"


def test_without_a_cache_the_mask_is_as_long_as_the_tokens(tmp_path):
    ids = torch.randint(3, 90, (2, 4))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    export_onnx(make_model("llama"), kwargs=kwargs, path=tmp_path / "a.onnx", cases=[])
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == axes["attention_mask"] == ["batch_size", "sequence_length"]


class _Compares(torch.nn.Module):
    def forward(self, input_ids, pixel_values):
        return input_ids.float().mean(1)[:, None] - pixel_values.mean((1, 2, 3))[None]


class _Sees(torch.nn.Module):
    def forward(self, pixel_values):
        return pixel_values.mean((1, 2, 3))


class _Reads(torch.nn.Module):
    def forward(self, input_ids, pixel_values):
        return input_ids.float().mean(1), pixel_values.mean((1, 2, 3))


PAIR = {"input_ids": torch.ones(2, 5).long(), "pixel_values": torch.rand(3, 3, 8, 8)}


@pytest.mark.parametrize(
    ("module", "kwargs", "texts", "pictures"),
    [
        (_Compares(), PAIR, "texts", "images"),
        (_Reads(), PAIR, "batch_size", "images"),
        (_Sees(), {"pixel_values": torch.rand(3, 3, 8, 8)}, "batch_size", "batch_size"),
    ],
    ids=["each text with each picture", "pictures in a prompt", "pictures alone"],
)
def test_pictures_have_a_name_of_their_own_where_there_are_texts(tmp_path, module, kwargs, texts, pictures):
    """As in CLIP, where each text is compared with each picture; their axis was `s99`."""
    export_onnx(module, kwargs=kwargs, path=tmp_path / "a.onnx", cases=[])
    axes = _axes(tmp_path / "a.onnx")
    assert axes["pixel_values"][0] == pictures
    outputs = [names for name, names in axes.items() if name not in kwargs]
    assert outputs[-1][-1] == pictures
    assert outputs[0][0] == axes.get("input_ids", [texts])[0] == texts


class _Prompted(torch.nn.Module):
    """Reads a prompt whose mask also covers what was read before, and a canvas: as DiffusionGemma does."""

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        """Weigh each of all tokens by its distance to the end, in parts that onnxruntime gives memory of their own."""
        new = torch.arange(input_ids.shape[1]).float()
        whole = torch.arange(attention_mask.shape[1]).float()
        read = (input_ids * new.sin()).sum(1, keepdim=True)
        return (attention_mask * whole.sin()).sum(1, keepdim=True) + read * decoder_input_ids


def test_axes_of_two_sizes_have_two_names(tmp_path):
    """Where both would be the encoder's length: onnxruntime gives axes of one name memory of one size."""
    kwargs = {
        "input_ids": torch.ones(2, 3),
        "attention_mask": torch.ones(2, 8),
        "decoder_input_ids": torch.arange(12.0).reshape(2, 6),
    }
    other = {"input_ids": torch.ones(3, 4), "attention_mask": torch.ones(3, 9), "decoder_input_ids": torch.ones(3, 2)}
    report = export_onnx(_Prompted(), kwargs=kwargs, path=tmp_path / "a.onnx", cases=[Case("other", (), other)]).report
    assert report.ok
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == ["batch_size", "encoder_sequence_length"]
    assert axes["attention_mask"][0] == "batch_size"
    assert axes["attention_mask"][1] not in {"encoder_sequence_length", "decoder_sequence_length"}


@pytest.mark.parametrize("spell", [str, Dim], ids=["texts", "Dim"])
def test_names_of_the_user_come_first(spell, tmp_path):
    model = make_model("llama")
    inputs = decode_inputs(model, DecodeSizes())
    shapes = dynamic_shapes(inputs, {"input_ids": {0: spell("rows"), 1: spell("new")}})
    export_onnx(model, kwargs=inputs, path=tmp_path / "a.onnx", dynamic_shapes=shapes, cases=[], steps=1)
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == ["rows", "new"]
    assert axes["attention_mask"] == ["rows", "total_sequence_length"]
    assert axes["present.0.key"] == ["rows", 2, "total_sequence_length", 8]


class Scale(torch.nn.Module):
    def forward(self, x, y):
        return {"z": x.sum(1) + y}


def test_names_are_kept_for_any_module(tmp_path):
    args, other = (torch.ones(2, 3), torch.ones(2)), (torch.ones(5, 7), torch.ones(5))
    shapes = {"x": {0: "rows", 1: "columns"}, "y": {0: "rows"}}
    cases = [Case("other sizes", other)]
    export_onnx(Scale(), args, path=tmp_path / "a.onnx", dynamic_shapes=shapes, cases=cases)
    assert _axes(tmp_path / "a.onnx") == {"x": ["rows", "columns"], "y": ["rows"], "z": ["rows"]}


def test_a_program_takes_names_too():
    shapes = {"x": {0: "rows", 1: "columns"}, "y": {0: "rows"}}
    args = (torch.ones(2, 3), torch.ones(2))
    cases = [Case("other sizes", (torch.ones(5, 7), torch.ones(5)))]
    assert export_program(Scale(), args, dynamic_shapes=shapes, cases=cases).report.ok
    with pytest.raises(ReplayError, match="other sizes"):
        export_program(Scale(), args, dynamic_shapes={"x": {0: "rows"}, "y": {0: "rows"}}, cases=cases)


def test_a_name_for_two_sizes_is_refused():
    shapes = {"x": {0: "rows", 1: "rows"}, "y": {0: "rows"}}
    with pytest.raises(DynamicShapesError, match=r"x: axis 1 is called 'rows' and has size 3, .* size 2"):
        export_program(Scale(), (torch.ones(2, 3), torch.ones(2)), dynamic_shapes=shapes, cases=[])
