"""A model of which every layer slides, fed with a mask in place of a counter: the same scores, call after call."""

import pytest
import torch

from tests.cache_words import WORD, cache_of
from tests.models import WINDOW, make_model
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes
from yobx_flatten.huggingface.decoders import SlidingDecoder, why_not_sliding

pytestmark = pytest.mark.slow


def test_the_length_of_the_mask_stands_for_the_counter():
    model = make_model("mistral")
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=3, new=2))
    del kwargs["attention_mask"]
    decoder = SlidingDecoder(model, {**kwargs, "use_cache": True}, WORD)
    given = decoder.inputs(kwargs)
    assert given["attention_mask"].tolist() == [[1] * 5] * 2
    assert given["position_ids"].tolist() == [[3, 4]] * 2
    cache = cache_of(kwargs)
    with torch.no_grad():
        for step in range(WINDOW):
            found = decoder(**given)
            expected = model(input_ids=given["input_ids"], **{WORD: cache}, use_cache=True)
            torch.testing.assert_close(found["logits"], expected.logits, atol=1e-5, rtol=1e-5)
            assert given["position_ids"][0, 0] == 3 + 2 * step
            given = decoder.next_inputs(given, found, seed=step)
    assert cache_of(given)[0]["key"].shape[2] == WINDOW - 1


def test_tokens_with_codes_beside_them_are_counted_by_their_second_axis():
    """Kyutai's speech to text reads (batch, length, 1 + codebooks); beside the model's own loop, past its window."""
    model = make_codes_model()
    codes = torch.randint(1, 5, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    cache = cache_of(model(input_ids=codes[:, :3], use_cache=True))
    kwargs = {"input_ids": codes[:, 3:], WORD: cache, "use_cache": True}
    assert why_not_sliding(model, kwargs, WORD) is None
    decoder = SlidingDecoder(model, kwargs, WORD)
    given = decoder.inputs(kwargs)
    assert given["attention_mask"].shape == (2, 5)
    with torch.no_grad():
        for step in range(WINDOW):
            found = decoder(**given)
            mask = given[
                "attention_mask"
            ]  # without, transformers 5.17 lets the first of two new tokens read the second
            expected = model(input_ids=given["input_ids"], attention_mask=mask, **{WORD: cache}, use_cache=True)
            torch.testing.assert_close(found["logits"], expected.logits, atol=1e-5, rtol=1e-5)
            assert given["attention_mask"].shape[1] == 5 + 2 * step
            given = decoder.next_inputs(given, found, seed=step)


def make_codes_model():
    from transformers import KyutaiSpeechToTextConfig, KyutaiSpeechToTextForConditionalGeneration, MimiConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    small = {"intermediate_size": 32, "num_filters": 4, "codebook_size": 8, "codebook_dim": 8, "upsample_groups": 32}
    config = KyutaiSpeechToTextConfig(
        **sizes,
        vocab_size=40,
        codebook_vocab_size=9,
        pad_token_id=3,
        audio_pad_token_id=8,
        num_codebooks=2,
        ffn_dim=64,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        codec_config=MimiConfig(**sizes, **small).to_dict(),
    )
    return KyutaiSpeechToTextForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"token_type_ids": torch.ones(2, 3)}, "the inputs contain token_type_ids"),
        ({"input_ids": None}, "there are no input_ids"),
        ({"attention_mask": torch.ones(2, 1, 3, 8)}, "attention_mask has not the shape (batch, length)"),
        ({"use_cache": True}, None),
    ],
)
def test_inputs_that_tools_do_not_feed_are_named(more, reason):
    """Then the counter stays among the inputs of a file, and the report says why."""
    model = make_model("mistral")
    assert why_not_sliding(model, {**decode_inputs(model, DecodeSizes()), **more}, WORD) == reason


def test_a_specification_for_the_model_becomes_one_for_its_parts():
    model = make_model("mistral")
    kwargs = decode_inputs(model, DecodeSizes())
    decoder = SlidingDecoder(model, kwargs, WORD)
    shapes = dynamic_shapes(
        kwargs, {"input_ids": {0: "rows"}, "attention_mask": None, "past_key_values.value_W8_1": None}
    )
    found = decoder.shapes(shapes)
    assert found["input_ids"] == {0: "rows"}
    assert found["attention_mask"] is None
    assert set(found["position_ids"]) == {0, 1}
    assert [set(layer["key"]) for layer in found["cache"]] == [{0, 2}, {0, 2}]
    assert found["cache"][1]["value"] is None
    assert decoder.shapes(None) is None
