"""Folders of models that read sound or images, and of those that have no folder: a reason in one line."""

import pytest
import torch
import transformers

from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import DecodeSizes, GenerationError, InvalidArgumentError, decode_inputs
from yobx_flatten.huggingface.cases import why_not_resizable
from yobx_flatten.model_folder.pieces.tasks import pieces_for
from yobx_flatten.model_folder.source.configuration import class_for, small_config, small_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("speech_to_text", "is an audio encoder-decoder unlike Whisper: its configuration has no num_mel_bins"),
        ("xlstm", "takes no past_key_values"),
    ],
)
def test_a_model_that_no_folder_is_known_for_is_refused_with_the_reason(name, words):
    """Not by an error of its inside. Seamless's sound is of the first kind, and takes long to build."""
    with pytest.raises(GenerationError, match=words):
        pieces_for(small_model(name), "auto")


@needs_transformers("5.17", "BiT has another reason")
def test_a_small_model_that_cannot_be_made_is_refused_in_one_line():
    with pytest.raises(InvalidArgumentError, match=r"A small bit cannot be made: .*layer_types.* Name a folder"):
        small_model("bit")


def test_the_class_of_a_model_is_that_of_its_configuration():
    config = small_config("llama")
    config.architectures = ["LlamaOfMyOwn", "LlamaForSequenceClassification"]
    assert class_for(config) is transformers.LlamaForSequenceClassification
    config.architectures = ["LlamaOfMyOwn"]
    assert class_for(config) is transformers.LlamaForCausalLM
    with pytest.raises(InvalidArgumentError, match=r"transformers has no model for a P\w+Config\."):
        class_for(transformers.PretrainedConfig())


def test_decode_inputs_of_an_encoder_that_hears_say_what_to_do():
    """It ended in a TypeError of Whisper's encoder; other sizes for a replay are not known either."""
    model = small_model("whisper")
    with pytest.raises(InvalidArgumentError, match=r"reads input_features.*\n.*record_calls") as raised:
        decode_inputs(model, DecodeSizes())
    assert "WhisperForConditionalGeneration" in str(raised.value)
    kwargs = {"encoder_outputs": None, "decoder_input_ids": torch.zeros(1, 1).long()}
    assert why_not_resizable(model, kwargs, "") == "its encoder reads input_features"
    assert why_not_resizable(small_model("t5"), kwargs, "") is None


@pytest.mark.parametrize("name", ["swin", "segformer"])
def test_a_small_encoder_of_images_has_a_number_of_heads_for_each_stage(name):
    """One number for all stages is refused by its configuration."""
    model = small_model(name)
    size = getattr(model.config, "image_size", 64)
    with torch.no_grad():
        assert model(pixel_values=torch.zeros(1, 3, size, size))[0].isfinite().all()
    largest = 4_000_000 if is_older_than("5.24.0") else 1_000_000  # before, Segformer's entries have no common name
    assert sum(parameter.numel() for parameter in model.parameters()) < largest
