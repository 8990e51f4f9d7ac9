"""Transcripts as Whisper's own loop writes them: languages, tasks, times of words; and languages of a translator."""

import pytest
import torch

from tests.flatten.generate.listeners import listener, rows_that_end, sound, stated
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, OnnxGenerator, Sampling, export_folder, open_generator, open_model
from yobx_flatten.generate.settings import settings_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
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


SOUND = torch.randn(6, 16, 100, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture(scope="module")
def exported_model(tmp_path_factory):
    model, folder = listener(), tmp_path_factory.mktemp("spoken") / "out"
    assert export_folder(model, folder, proof="sample").verified.ok
    return model, folder


@pytest.mark.slow
def test_the_language_is_detected_for_each_row(exported_model):
    model, folder = exported_model
    model.generation_config = stated(lang_to_id={f"<|{token}|>": token for token in range(20, 180)})
    model.generation_config.save_pretrained(folder)
    many = torch.randn(200, 16, 100, generator=torch.Generator().manual_seed(2)).cumsum(-1)
    heard = model.detect_language(many)
    rows = [int((heard == language).nonzero()[0]) for language in heard.unique()]
    assert len(rows) > 1, "one language: no test"
    found = open_generator(folder).generate(input_features=many[rows], max_new_tokens=9)
    assert torch.equal(found, model.generate(many[rows], max_new_tokens=9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        {"language": "<|de|>", "task": "translate"},
        {"language": "de"},
        {"lang_to_id": None, "forced_decoder_ids": [[1, 189]]},  # of one language
        {"max_length": 40, "language": "en"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_what_is_stated_is_the_prompt(entries, exported_model):
    model, folder = exported_model
    model.generation_config = stated(**entries)
    if entries.get("lang_to_id", 0) is None:
        del model.generation_config.lang_to_id
    model.generation_config.save_pretrained(folder)
    limit = {} if "max_length" in entries else {"max_new_tokens": 9}
    found = open_generator(folder).generate(input_features=SOUND, **limit)
    assert torch.equal(found, model.generate(SOUND, **limit))


@pytest.mark.slow
def test_a_language_that_the_model_does_not_have_is_refused(exported_model):
    model, folder = exported_model
    model.generation_config = stated(language="xx")
    model.generation_config.save_pretrained(folder)
    with pytest.raises(InvalidArgumentError, match="xx"):
        open_generator(folder).generate(input_features=SOUND)


# transformers 5.24 gives a tensor to numpy.repeat
array_wrap = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")

HEADS = [[2, 3], [1, 2], [1, 0]]  # of two of three layers, in an order of their own


def aligned(heads=None):
    return listener(3, suppress_tokens=[1, 2, 7, 180], max_length=58, alignment_heads=heads)


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    model, folder = aligned(HEADS), tmp_path_factory.mktemp("words") / "out"
    assert export_folder(model, folder, word_times=True).verified.ok
    return model, folder


@array_wrap
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


@array_wrap
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


@array_wrap
def test_a_head_that_is_not_in_the_files_is_refused(heard):
    with pytest.raises(
        InvalidArgumentError, match=r"\[\[1, 1\]\], but the files return .*\(1, 0\), \(1, 2\), \(2, 3\)"
    ):
        open_generator(heard[1]).generate(
            input_features=sound(100), language="en", return_token_timestamps=True, alignment_heads=[[1, 1]]
        )


@array_wrap
def test_without_the_option_no_weights_are_computed(tmp_path):
    export_folder(aligned(HEADS), tmp_path / "out", to="program", proof="none")
    generator = open_generator(tmp_path / "out", trust=True)
    assert not any("attention" in name for name in generator.parts.decoder.outputs)
    with pytest.raises(InvalidArgumentError, match="word_times=True"):
        generator.generate(input_features=sound(100), language="en", return_token_timestamps=True)
    with pytest.raises(InvalidArgumentError, match="return_token_timestamps=True"):
        generator.generate(input_features=sound(100), return_timestamps="word")


@array_wrap
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


@array_wrap
def test_an_export_leaves_the_model_as_it_was(heard):
    model = heard[0]
    for layer in model.model.decoder.layers:
        assert layer.encoder_attn.config is model.config
        hooks = layer.encoder_attn._forward_hooks.values()
        assert not [hook for hook in hooks if hook.__module__.startswith("yobx_flatten")]
