"""Whisper's own loop over its files: languages, tasks, times, windows; and languages that a translator is asked for."""

import pytest
import torch

from tests.flatten.generate.listeners import listener, rows_that_end, sound
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, OnnxGenerator, Sampling, export_folder, open_generator
from yobx_flatten.generate.settings import settings_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A model whose configuration of generation states languages, tasks and times, and its folder."""
    model = listener(begin_suppress_tokens=[20, 180], max_length=58)
    folder = tmp_path_factory.mktemp("whisper") / "out"
    assert export_folder(model, folder).verified.ok
    return model, open_generator(folder)


@pytest.mark.parametrize(
    ("frames", "asked"),
    [
        (100, {}),
        (100, {"language": "de", "task": "translate", "max_new_tokens": 12}),
        (100, {"language": ["de", "en"], "max_new_tokens": 12}),
        (100, {"language": "en", "return_timestamps": True, "max_new_tokens": 30}),
        (60, {"language": "en", "max_new_tokens": 12}),
        (100, {"language": "en", "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12}),
        (330, {"language": "en", "return_timestamps": True, "attention_mask": rows_that_end(330, 210)}),
        (330, {"return_timestamps": True, "num_beams": 2, "attention_mask": rows_that_end(330, 330)}),
    ],
    ids=["detected", "translation", "languages", "times", "short", "beams", "windows", "beams of windows"],
)
def test_a_call_returns_the_tokens_of_the_model(whisper, frames, asked):
    model, generator = whisper
    wanted = model.generate(sound(frames), **asked)
    assert torch.equal(generator.generate(input_features=sound(frames), **asked), wanted)


def test_short_sound_after_given_tokens_is_padded_as_the_model_pads_it(whisper):
    """It ended in an error of a node."""
    model, generator = whisper
    begin = torch.tensor([[181, 182, 184, 189]] * 2)
    wanted = model.generate(sound(60), language="en", task="transcribe", max_new_tokens=12)
    found = generator.generate(input_features=sound(60), decoder_input_ids=begin, max_new_tokens=12)
    assert torch.equal(found[:, 4:], wanted)


def test_draws_follow_the_seed(whisper):
    _, generator = whisper
    call = {"language": "en", "max_new_tokens": 12, "sampling": Sampling(do_sample=True, seed=4)}
    before = torch.get_rng_state()
    first, second = (generator.generate(input_features=sound(100), **call) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("frames", "asked", "words"),
    [
        (100, {"language": "xx"}, "Unsupported language: xx"),
        (100, {"task": "sing"}, "The `sing` task is not supported"),
        (330, {}, "return_timestamps=True"),
        (100, {"return_timestamps": "word"}, "times of words, .*\n.*return_token_timestamps=True"),
        (100, {"language": "en", "decoder_input_ids": torch.tensor([[181]] * 2)}, "already set language"),
    ],
)
def test_a_call_that_cannot_be_done_is_refused_in_a_line(whisper, frames, asked, words):
    with pytest.raises(InvalidArgumentError, match=words):
        whisper[1].generate(input_features=sound(frames), **asked)


def test_a_stream_of_a_model_with_languages_needs_the_tokens_that_begin_a_text(whisper):
    """Without them it would be another text than that of `generate`."""
    with pytest.raises(InvalidArgumentError, match="Call generate"):
        whisper[1].stream(input_features=sound(100))


def test_a_model_without_languages_refuses_them_and_sound_longer_than_its_window():
    text, heard = (OnnxGenerator(exported(name)[1]) for name in ("t5", "whisper"))
    with pytest.raises(InvalidArgumentError, match="lang_to_id"):
        text.generate(torch.tensor([[5, 6]]), language="de")
    config = exported("whisper")[0].config
    long = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions + 1)
    with pytest.raises(InvalidArgumentError, match="reads windows of"):
        heard.generate(input_features=long)


@pytest.mark.parametrize("beams", [1, 3])
def test_the_language_of_a_translation_is_the_token_of_the_call(beams):
    """As `forced_bos_token_id=` of `model.generate`, also where tokens are suppressed at the beginning."""
    model, folder = exported("t5")
    settings = settings_of(model.config.to_dict(), {**model.generation_config.to_dict(), "begin_suppress_tokens": [9]})
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    asked = {"forced_bos_token_id": 7, "max_new_tokens": 8, "num_beams": beams}
    wanted = model.generate(prompt, do_sample=False, begin_suppress_tokens=[9], **asked)
    found = OnnxGenerator(folder, settings=settings).generate(prompt, **asked)
    assert torch.equal(found, wanted)
    assert set(found[:, 1].tolist()) == {7}


@pytest.mark.parametrize("beams", [1, 3])
def test_one_folder_translates_into_several_languages(beams):
    """M2M100, which NLLB is too: the language is an argument of each call, and rows are padded on the right."""
    model, folder = exported("m2m_100")
    prompt = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    generator = open_generator(folder)
    for language in (40, 41):
        asked = {"forced_bos_token_id": language, "max_new_tokens": 8, "num_beams": beams}
        found = generator.generate(prompt, mask, **asked)
        assert torch.equal(found, model.generate(prompt, attention_mask=mask, do_sample=False, **asked))
        assert set(found[:, 1].tolist()) == {language}


def test_a_language_that_is_no_token_is_refused():
    """A negative number would count from the end of the vocabulary."""
    with pytest.raises(InvalidArgumentError, match="forced_bos_token_id must be a token"):
        OnnxGenerator(exported("t5")[1]).generate(torch.tensor([[5]]), forced_bos_token_id=-1)
