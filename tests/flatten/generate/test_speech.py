"""Transcripts as Whisper's own loop writes them, languages of a translator, and speech of SpeechT5."""

import shutil

import pytest
import torch
import transformers

from tests.flatten.model_folder.exported_folders import exported, made
from tests.models import BART_SIZES
from yobx_flatten import InvalidArgumentError, OnnxGenerator, ReplayError, Sampling, load_case, save_case
from yobx_flatten.generate.settings import settings_of
from yobx_flatten.model_folder import export_folder, open_generator, open_model, verify_folder
from yobx_flatten.model_folder.pieces.spoken import FrameDecoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:__array_wrap__:DeprecationWarning"
    ),  # transformers 5.24, numpy.repeat of a tensor
]

_TOKENS = {"eos_token_id": 180, "bos_token_id": 180, "pad_token_id": 180, "decoder_start_token_id": 181}
_LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 182, "<|de|>": 183, "<|fr|>": 186},
    "task_to_id": {"transcribe": 184, "translate": 185},
    "no_timestamps_token_id": 189,
    "prev_sot_token_id": 187,
    "return_timestamps": False,
    "max_initial_timestamp_index": 5,
}


def stated(**entries):
    config = transformers.GenerationConfig(**_TOKENS, suppress_tokens=[1, 2, 7])
    for name, value in {**_LANGUAGES, **entries}.items():
        setattr(config, name, value)
    return config


def listener(layers=2, **entries):
    sizes = {"layers": layers, "attention_heads": 4, "ffn_dim": 48}
    sizes = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in sizes.items()}
    sizes |= {"vocab_size": 200, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 50}
    config = transformers.WhisperConfig(**sizes, **_TOKENS, max_target_positions=60, init_std=0.4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = stated(**entries)
    return model


def sound(frames, rows=2):
    return torch.randn(rows, 16, frames, generator=torch.Generator().manual_seed(3))


def rows_that_end(frames, end):
    mask = torch.ones(2, frames, dtype=torch.int64)
    mask[1, end:] = 0
    return mask


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


def test_short_sound_after_given_tokens_is_padded_and_draws_follow_the_seed(whisper):
    model, generator = whisper
    begin = torch.tensor([[181, 182, 184, 189]] * 2)
    wanted = model.generate(sound(60), language="en", task="transcribe", max_new_tokens=12)
    found = generator.generate(input_features=sound(60), decoder_input_ids=begin, max_new_tokens=12)
    assert torch.equal(found[:, 4:], wanted)
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
        (100, {"language": "en", "decoder_input_ids": torch.tensor([[181]] * 2)}, "already sets language"),
    ],
)
def test_a_call_that_cannot_be_done_is_refused_in_a_line(whisper, frames, asked, words):
    with pytest.raises(InvalidArgumentError, match=words):
        whisper[1].generate(input_features=sound(frames), **asked)
    with pytest.raises(InvalidArgumentError, match="Call generate"):  # a stream has no tokens that begin its text
        whisper[1].stream(input_features=sound(frames))


def test_a_model_without_languages_refuses_them_and_sound_longer_than_its_window():
    text, heard = (OnnxGenerator(exported(name)[1]) for name in ("t5", "whisper"))
    with pytest.raises(InvalidArgumentError, match="lang_to_id"):
        text.generate(torch.tensor([[5, 6]]), language="de")
    with pytest.raises(InvalidArgumentError, match="forced_bos_token_id must be a token"):  # -1 is the last
        text.generate(torch.tensor([[5]]), forced_bos_token_id=-1)
    config = exported("whisper")[0].config
    long = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions + 1)
    with pytest.raises(InvalidArgumentError, match="reads at most"):
        heard.generate(input_features=long)


@pytest.mark.parametrize("beams", [1, 3])
def test_one_folder_translates_into_several_languages(beams):
    """M2M100, which NLLB is too: the language is an argument of each call, and rows are padded on the right."""
    model, folder = exported("m2m_100")
    prompt = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    suppressed = {"begin_suppress_tokens": [9]}  # at the beginning, where the language stands
    settings = settings_of(model.config.to_dict(), {**model.generation_config.to_dict(), **suppressed})
    for generator, rules in ((open_generator(folder), {}), (OnnxGenerator(folder, settings=settings), suppressed)):
        for language in (40, 41):
            asked = {"forced_bos_token_id": language, "max_new_tokens": 8, "num_beams": beams}
            found = generator.generate(prompt, mask, **asked)
            wanted = model.generate(prompt, attention_mask=mask, do_sample=False, **asked, **rules)
            assert torch.equal(found, wanted)
            assert set(found[:, 1].tolist()) == {language}


SOUND = torch.randn(6, 16, 100, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture(scope="module")
def exported_model(tmp_path_factory):
    model, folder = listener(), tmp_path_factory.mktemp("spoken") / "out"
    assert export_folder(model, folder, proof="sample").verified.ok
    return model, folder


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
    stated(language="xx").save_pretrained(folder)
    with pytest.raises(InvalidArgumentError, match="xx"):
        open_generator(folder).generate(input_features=SOUND)


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
        (330, {"return_timestamps": True, "num_beams": 2, "attention_mask": rows_that_end(330, 250)}),
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


def test_the_heads_are_those_that_are_stated_now_and_others_are_refused(heard):
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
    with pytest.raises(
        InvalidArgumentError, match=r"\[\[1, 1\]\], but the files return .*\(1, 0\), \(1, 2\), \(2, 3\)"
    ):
        open_generator(folder).generate(input_features=sound(100), **asked, alignment_heads=[[1, 1]])


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
        (aligned, "alignment_heads, but this WhisperFor.* has none"),
        (lambda: aligned([[3, 0]]), r"has \[3, 0\], but the decoder has 3 layers of 4 heads"),
        (lambda: exported("t5")[0], "alignment_heads"),
        (lambda: exported("llama")[0], "is for Whisper"),
    ],
    ids=["no heads", "a head that is not there", "text to text", "text"],
)
def test_a_model_without_such_heads_is_refused(make, words, tmp_path):
    with pytest.raises(InvalidArgumentError, match=words):
        export_folder(make(), tmp_path / "out", word_times=True)


def test_an_export_leaves_the_model_as_it_was(heard):
    model = heard[0]
    for layer in model.model.decoder.layers:
        assert layer.encoder_attn.config is model.config
        hooks = layer.encoder_attn._forward_hooks.values()
        assert not [hook for hook in hooks if hook.__module__.startswith("yobx_flatten")]


LAYERS = {name: size for name, size in BART_SIZES.items() if name != "d_model"}
SPOKEN = {"vocab_size": 40, "hidden_size": 32, "num_mel_bins": 8, "speech_decoder_prenet_units": 16}
SPOKEN |= {"speech_decoder_postnet_units": 16, "speaker_embedding_dim": 12, "initializer_range": 0.3}
SPOKEN |= {"max_speech_positions": 100}
HEARD = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
HEARD |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}


def speaker(kind=transformers.SpeechT5ForTextToSpeech):
    return made(kind, transformers.SpeechT5Config(**LAYERS, **SPOKEN, **HEARD))


@pytest.fixture(scope="module")
def spoken_folder(tmp_path_factory):
    model, path = speaker(), tmp_path_factory.mktemp("spoken") / "out"
    done = export_folder(model, path)
    assert (done.task, done.verified.ok) == ("text-to-audio", True)
    assert done.verified.checks[-1].file == "generate"
    return model, path


def said(model, read, seed=3, **asked):
    torch.manual_seed(seed)
    return model.generate_speech(read, **asked)


def texts(rows, length):
    ids = torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[-1, length - 3 :] = 0
    return ids, {"attention_mask": mask, "speaker_embeddings": numbers(rows, 12), "return_output_lengths": True}


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_rows_that_end_at_other_frames_are_those_of_the_model(spoken_folder):
    model, path = spoken_folder
    generator, lengths = open_generator(path), set()
    for rows, length in ((1, 9), (3, 9), (4, 6)):
        ids, asked = texts(rows, length)
        for threshold in (0.9, 1.3):
            asked |= {"threshold": threshold, "maxlenratio": 10.0}
            wanted, ends = said(model, ids, **asked)
            found, found_ends = said(generator, ids, **asked)
            assert found_ends == ends
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            lengths |= set(ends)
    assert len(lengths) > 2, "all rows end alike: no test"
    other = said(generator, ids, seed=4, **asked)[0]
    assert other.shape != wanted.shape or (other - wanted).abs().max() > 0.1


def test_a_vocoder_is_a_model_or_its_folder(spoken_folder, tmp_path):
    model, path = spoken_folder
    rates = {"upsample_rates": (4, 2), "upsample_kernel_sizes": (8, 4), "upsample_initial_channel": 16}
    blocks = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3),), "initializer_range": 0.5}
    config = transformers.SpeechT5HifiGanConfig(model_in_dim=8, **rates, **blocks)
    vocoder = made(transformers.SpeechT5HifiGan, config)
    assert export_folder(vocoder, tmp_path / "vocoder").task == "vocoder"
    of_files = open_model(tmp_path / "vocoder")
    speaking = open_model(path)
    for rows in (1, 3):
        ids, asked = texts(rows, 7)
        del asked["return_output_lengths"]
        wanted = said(model, ids, **asked, vocoder=vocoder)
        assert wanted.ndim == (1 if rows == 1 else 2)
        for one in (vocoder, of_files):
            torch.testing.assert_close(said(speaking, ids, **asked, vocoder=one), wanted, atol=1e-3, rtol=1e-3)


def test_a_voice_is_changed_as_by_the_model(tmp_path):
    model = speaker(transformers.SpeechT5ForSpeechToSpeech)
    assert export_folder(model, tmp_path / "out", to="program").task == "audio-to-audio"
    sound, mask = numbers(2, 3100), torch.ones(2, 3100, dtype=torch.int64)
    mask[1, 2000:] = 0
    asked = {"attention_mask": mask, "speaker_embeddings": numbers(2, 12), "maxlenratio": 0.1, "threshold": 1.3}
    wanted, found = (said(one, sound, **asked) for one in (model, open_generator(tmp_path / "out", trust=True)))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_prenet_that_computes_something_else_is_not_published(tmp_path, monkeypatch):
    """The prenet is written out for one frame; another factor of its dropout is seen in the case of the folder."""
    made = FrameDecoder.__init__

    def other(self, model):
        made(self, model)
        self.dropout += 0.1

    monkeypatch.setattr(FrameDecoder, "__init__", other)
    with pytest.raises(ReplayError, match="differs from the model"):
        export_folder(speaker(), tmp_path / "out", to="program")
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_case_says_something_else_is_not_verified(spoken_folder, tmp_path):
    shutil.copytree(spoken_folder[1], tmp_path / "out")
    stored = tmp_path / "out/cases/generate.case"
    case = load_case(stored)
    case.outputs["spectrogram"][1, 3, 2] += 0.01
    save_case(stored, case.inputs, case.outputs, name=case.name)
    assert not verify_folder(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_cross_attentions": True}, "Call the model itself"),
        ({"speaker_embeddings": numbers(2, 11)}, r"must be \(2, 12\)"),
        ({"speaker_embeddings": None}, "speaker_embeddings"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\)"),
        ({"maxlenratio": 50.0, "threshold": 9.0}, "100 positions"),
    ],
    ids=["attentions", "size of the speaker", "no speaker", "mask", "too long"],
)
def test_speech_that_cannot_be_made_is_refused_in_a_line(spoken_folder, change, words):
    ids, asked = texts(2, 7)
    with pytest.raises(InvalidArgumentError, match=words):
        said(open_generator(spoken_folder[1]), ids, **{**asked, **change})


@pytest.mark.parametrize(
    ("option", "words"),
    [({"quantize": "int8"}, "add up from frame to frame"), ({"layout": "transformers.js"}, "one file")],
)
def test_what_nothing_proves_is_refused(option, words, tmp_path):
    with pytest.raises(InvalidArgumentError, match=words):
        export_folder(speaker(), tmp_path / "out", **option)


def test_folders_that_write_tokens_and_folders_that_speak_name_each_others_call(spoken_folder):
    with pytest.raises(InvalidArgumentError, match="call generate_speech"):
        open_generator(spoken_folder[1]).generate(torch.tensor([[5, 6]]))
    with pytest.raises(InvalidArgumentError, match=r"Call generate\(\)"):
        open_generator(exported("t5")[1]).generate_speech(torch.tensor([[5, 6]]), numbers(1, 12))
