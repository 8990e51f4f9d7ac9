"""Decode inputs of the matrix: pictures, sounds, several channels; what the next call takes."""

import pytest
import torch

from matrix.inputs import NoCacheError, decode, go_on, loop
from matrix.media import IMAGE_TOKEN, picture_of
from matrix.models import make_model
from tests.cache_words import cache_of
from tests.runtime.huggingface.hf_small import known_model
from yobx_flatten import DecodeSizes

SIZES = DecodeSizes(2, 5, 3)


@pytest.mark.parametrize(
    "name",
    [
        "musicgen",  # has several embeddings
        "seq2seq:prophetnet",  # decodes one token at a time
        "seq2seq:voxtral_realtime",  # two caches, and a sound for every token
        "image:granite4_vision",  # makes no cache of its own
        "image:idefics",  # looks at the picture in every call
        "image:pix2struct",  # an encoder of pictures
        "image:udop",  # boxes on a page
        "speech:dia",  # has no get_input_embeddings; a code per channel
        "speech:kyutai_speech_to_text",
        "speech:speech-encoder-decoder",
        "speech:whisper",
    ],
)
def test_a_model_goes_on_from_its_decode_inputs(name):
    model = known_model(name)
    kwargs = decode(model, SIZES)
    assert len(loop(model, kwargs, 3)) == 3
    assert len(go_on(model, kwargs, cache_of(kwargs), 4)) == 4


def test_a_prompt_begins_with_a_picture():
    model = make_model("image:llava")
    _, length = picture_of(model, 2, torch.Generator().manual_seed(1))
    kwargs = decode(model, SIZES)
    assert cache_of(kwargs).get_seq_length() == length + SIZES.past
    assert kwargs["attention_mask"].shape == (2, length + SIZES.past + SIZES.new)
    assert not (kwargs["input_ids"] == IMAGE_TOKEN).any()


def test_positions_behind_a_picture_are_inputs_and_not_the_models_memory():
    """Qwen2-VL keeps the difference of its last prompt; a program would hold it as a constant."""
    model = make_model("image:qwen2_vl")
    kwargs = decode(model, SIZES)
    # a picture of 2 x 2 parts takes 2 positions, so all that follows is 2 behind the number of tokens
    assert kwargs["position_ids"][:, 1].tolist() == [[7, 8, 9]] * 3
    assert model.model.rope_deltas is None


@pytest.mark.parametrize("name", ["image:blip", "image:pi0"])
def test_a_model_without_a_cache_says_so(name):
    with pytest.raises(NoCacheError):
        decode(make_model(name), SIZES)
