"""A cache that OpenVINO writes in place: the state of the model, proven, rewound and reordered next to the model."""

import importlib.util

import numpy
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

pytest.importorskip("openvino")


from tests.flatten.export.rewound_rows import WritesInPlace, padded_prompt, small_llama, small_mistral
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_program, open_generator, open_model
from yobx_flatten.errors import InvalidArgumentError
from yobx_flatten.export.runtimes import openvino as writer
from yobx_flatten.export.runtimes.openvino import copied_states, keep_in_state
from yobx_flatten.runners.openvino_runner import import_openvino, read_model


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("openvino") / "llama"
    return export_folder(model, place, target="openvino", proof="sample")


def _inputs_of(path):
    return {name for port in read_model(path).inputs for name in port.names}


def test_the_cache_is_no_input_of_the_file_which_writes_all_of_it_in_place(folder):
    """All layers add one mask of numbers: OpenVINO would convert one of booleans in each layer, entry by entry."""
    path = folder.path / "model.xml"
    model = read_model(path)
    assert _inputs_of(path) == {"input_ids", "attention_mask", "position_ids", "beam_idx"}
    assert [next(iter(port.names)) for port in model.outputs] == ["logits"]
    compiled = import_openvino().Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert "float32" in str(compiled.get_property("KV_CACHE_PRECISION"))
    assert copied_states(path) == []
    nodes = read_model(path).get_ops()
    masks = [node.input(3).get_source_output() for node in nodes if node.get_type_name().endswith("Attention")]
    assert len(masks) == 2
    assert masks[0] == masks[1]
    assert "float32" in str(masks[0].get_element_type())


@pytest.mark.parametrize("open_folder", [open_generator, open_model])
def test_openvino_has_as_many_threads_as_are_asked_for(folder, open_folder):
    """Where OpenVINO chooses, threads that wait take time of the processor."""
    assert open_folder(folder.path, threads=1).steps.parts.decoder._compiled.get_property("INFERENCE_NUM_THREADS") == 1


class TestFile(WritesInPlace):
    file = "model.xml"
    calls = (6,)


def test_two_texts_at_a_time_do_not_mix(model, folder):
    generator = open_generator(folder.path)
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[50, 60, 70, 80]])
    found = list(zip(*(generator.stream(ids, max_new_tokens=8) for ids in (first, second)), strict=True))
    for column, ids in enumerate((first, second)):
        wanted = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert [int(step[column]) for step in found] == wanted.tolist()


def test_a_file_whose_calls_return_the_cache_is_there_on_request(model, tmp_path):
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), proof="none")
    report = exported.to_openvino(tmp_path / "model.xml", cache="returned")
    assert "past_key_values.0.key" in _inputs_of(tmp_path / "model.xml")
    assert report.in_place == []
    with pytest.raises(InvalidArgumentError, match='cache must be "in_place" or "returned", found \'state\''):
        exported.to_openvino(tmp_path / "other.xml", cache="state")


def test_layers_that_slide_keep_a_cache_that_is_returned(tmp_path):
    """What such a layer returns is no longer its input with new tokens after it; the report states that."""
    model = small_mistral()
    found = export_folder(model, tmp_path / "mistral", target="openvino", proof="sample")
    notes = [note for note in found.reports["model.xml"].remarks if "cache" in note]
    assert any("the cache is copied by each call" in note and "layers have a sliding window" in note for note in notes)
    assert found.verified.manifest.cache == "growing"
    asked = {**padded_prompt(), "max_new_tokens": 12}
    assert torch.equal(open_generator(found.path).generate(**asked), model.generate(**asked, do_sample=False))


def _off_by_one(read, presents):
    from openvino import opset13 as operators

    kept = keep_in_state(read, presents)
    (result,) = (port.get_node() for port in read.outputs)
    scores = result.input(0).get_source_output()
    result.input(0).replace_source_output(operators.add(scores, operators.constant(numpy.float32(1.0))).output(0))
    return kept


@pytest.mark.parametrize(
    ("replaced", "by", "reason"),
    [
        ("keep_in_state", _off_by_one, "the example: it differs by 1.0e+00"),
        ("copied_states", lambda path: ["one"], "in each call, OpenVINO would copy 1 of the 4 KV cache tensors."),
        ("keep_in_state", lambda read, presents: 1 // 0, "ZeroDivisionError: "),
    ],
    ids=["differs", "is copied", "stops"],
)
def test_a_form_that_does_not_pass_is_left_out(model, tmp_path, monkeypatch, replaced, by, reason):
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])
    monkeypatch.setattr(writer, replaced, by)
    report = exported.to_openvino(tmp_path / "model.xml")
    expected = f"the cache is copied by each call: a file that writes it in place was left out: {reason}"
    assert [note for note in report.remarks if note.startswith(expected)], report.remarks
    assert (report.ok, report.in_place, len(report.cases)) == (True, [], 1)
    assert "past_key_values.0.key" in _inputs_of(tmp_path / "model.xml")


def test_weights_in_8_bits_have_such_a_cache_too(model, tmp_path):
    if importlib.util.find_spec("nncf") is None:  # its import would change the class of all loggers
        pytest.skip("NNCF is not installed")
    found = export_folder(model, tmp_path / "llama", target="openvino", proof="sample", quantize="int8")
    assert found.verified.ok
    assert copied_states(found.path / "model.xml") == []


def test_a_decoder_after_an_encoder_keeps_its_own_tokens_in_place(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)).eval()
    found = export_folder(model, tmp_path / "t5", target="openvino", proof="sample")
    report = found.reports["decoder_with_past_model.xml"]
    assert report.in_place[0] == "past_key_values.0.decoder.key"
    assert not any("encoder" in name.split(".") for name in report.in_place)
    asked = {"input_ids": torch.randint(3, 96, (2, 7)), "max_new_tokens": 12}
    generator = open_generator(found.path)
    for options in ({}, {"num_beams": 3}):
        assert torch.equal(generator.generate(**asked, **options), model.generate(**asked, **options, do_sample=False))
