"""Times of words from the files of Whisper, next to those of `model.generate`."""

import pytest
import torch

from tests.flatten.generate.listeners import listener, rows_that_end, sound
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, export_folder, open_generator, open_model

pytestmark = [
    pytest.mark.slow,
    # transformers 5.24 gives a tensor to numpy.repeat
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
]

HEADS = [[2, 3], [1, 2], [1, 0]]  # of two of three layers, in an order of their own


def aligned(heads=None):
    return listener(3, suppress_tokens=[1, 2, 7, 180], max_length=58, alignment_heads=heads)


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    model, folder = aligned(HEADS), tmp_path_factory.mktemp("words") / "out"
    assert export_folder(model, folder, word_times=True).verified.ok
    return model, folder


@pytest.mark.parametrize(
    ("frames", "asked"),
    [
        (100, {"language": "en"}),
        (100, {"return_timestamps": True, "attention_mask": rows_that_end(100, 70)}),
        (60, {"language": "de", "attention_mask": rows_that_end(60, 50)}),
        (100, {"language": "en", "num_beams": 3}),
        (330, {"language": "en", "return_timestamps": True, "attention_mask": rows_that_end(330, 210)}),
        (
            330,
            {
                "return_timestamps": True,
                "num_beams": 2,
                "attention_mask": rows_that_end(330, 250),
                "return_segments": True,
            },
        ),
    ],
    ids=["one window", "rows that end", "short", "beams", "windows", "beams of windows"],
)
def test_each_token_has_the_time_of_the_model(heard, frames, asked):
    model, folder = heard
    wanted = model.generate(sound(frames), return_token_timestamps=True, **asked)
    for opened in (open_generator(folder), open_model(folder)):
        found = opened.generate(input_features=sound(frames), return_token_timestamps=True, **asked)
        assert found.keys() == wanted.keys()
        assert torch.equal(found["sequences"], wanted["sequences"])
        assert torch.equal(found["token_timestamps"], wanted["token_timestamps"])
    assert len(wanted["token_timestamps"].unique()) > 4, "one time for all: no test"


def test_the_heads_are_those_that_are_stated_now(heard):
    model, folder = heard
    asked = {"language": "en", "return_token_timestamps": True}
    usual = model.generate(sound(100), **asked)["token_timestamps"]
    for heads in ([[1, 0]], [[1, 2], [2, 3]]):
        wanted = model.generate(sound(100), **asked, alignment_heads=heads)["token_timestamps"]
        assert not torch.equal(wanted, usual)
        found = open_generator(folder).generate(input_features=sound(100), **asked, alignment_heads=heads)
        assert torch.equal(found["token_timestamps"], wanted)
        opened = open_model(folder)
        opened.generation_config.alignment_heads = heads
        found = opened.generate(input_features=sound(100), **asked)
        assert torch.equal(found["token_timestamps"], wanted)


def test_a_head_that_is_not_in_the_files_is_refused(heard):
    with pytest.raises(
        InvalidArgumentError, match=r"\[\[1, 1\]\], but the files return .*\(1, 0\), \(1, 2\), \(2, 3\)"
    ):
        open_generator(heard[1]).generate(
            input_features=sound(100), language="en", return_token_timestamps=True, alignment_heads=[[1, 1]]
        )


def test_without_the_option_no_weights_are_computed(tmp_path):
    export_folder(aligned(HEADS), tmp_path / "out", to="program", proof="none")
    generator = open_generator(tmp_path / "out", trust=True)
    assert not any("attention" in name for name in generator.parts.decoder.outputs)
    with pytest.raises(InvalidArgumentError, match="word_times=True"):
        generator.generate(input_features=sound(100), language="en", return_token_timestamps=True)
    with pytest.raises(InvalidArgumentError, match="return_token_timestamps=True"):
        generator.generate(input_features=sound(100), return_timestamps="word")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (aligned, "alignment_heads, and this WhisperFor.* names none"),
        (lambda: aligned([[3, 0]]), r"has \[3, 0\], and the decoder has 3 layers of 4 heads"),
        (lambda: exported("t5")[0], "alignment_heads"),
        (lambda: exported("llama")[0], "is for Whisper"),
    ],
    ids=["no heads", "a head that is not there", "text to text", "text"],
)
def test_a_model_without_such_heads_is_refused(make, words, tmp_path):
    with pytest.raises(InvalidArgumentError, match=words):
        export_folder(make(), tmp_path / "out", word_times=True)


def test_an_export_leaves_the_model_as_it_was(heard):
    """Its attention is written out while a call is recorded only."""
    model = heard[0]
    for layer in model.model.decoder.layers:
        assert layer.encoder_attn.config is model.config
        hooks = layer.encoder_attn._forward_hooks.values()
        assert not [hook for hook in hooks if hook.__module__.startswith("yobx_flatten")]
