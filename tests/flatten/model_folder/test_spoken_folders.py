"""Folders of models that write spectrograms, next to `model.generate_speech` with the same seed."""

import shutil

import pytest
import torch
import transformers

from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, export_folder, open_generator, open_model, verify_folder
from yobx_flatten.errors import ReplayError
from yobx_flatten.model_folder.pieces.spoken import FrameDecoder
from yobx_flatten.storage.cases import load_case, save_case

pytestmark = pytest.mark.slow

LAYERS = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
LAYERS |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
LAYERS |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_mel_bins": 8, "speech_decoder_prenet_units": 16}
SIZES |= {"speech_decoder_postnet_units": 16, "speaker_embedding_dim": 12, "initializer_range": 0.3}
SIZES |= {"max_speech_positions": 100}
HEARD = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
HEARD |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}


def speaker(kind=transformers.SpeechT5ForTextToSpeech):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(transformers.SpeechT5Config(**LAYERS, **SIZES, **HEARD)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def test_rows_that_end_at_other_frames_are_those_of_the_model(folder):
    model, path = folder
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


def test_a_vocoder_is_a_model_or_its_folder(folder, tmp_path):
    model, path = folder
    rates = {"upsample_rates": (4, 2), "upsample_kernel_sizes": (8, 4), "upsample_initial_channel": 16}
    blocks = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3),), "initializer_range": 0.5}
    config = transformers.SpeechT5HifiGanConfig(model_in_dim=8, **rates, **blocks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vocoder = transformers.SpeechT5HifiGan(config).eval()
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
    """The prenet is written out for one frame; a position that is one off is seen in the case of the folder."""
    read = FrameDecoder.read
    monkeypatch.setattr(
        FrameDecoder, "read", lambda self, frame, one, masks, place: read(self, frame, one, masks, place + 1)
    )
    with pytest.raises(ReplayError, match="differs from the model"):
        export_folder(speaker(), tmp_path / "out", to="program")
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_case_says_something_else_is_not_verified(folder, tmp_path):
    shutil.copytree(folder[1], tmp_path / "out")
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
def test_a_call_that_cannot_be_done_is_refused_in_a_line(folder, change, words):
    ids, asked = texts(2, 7)
    with pytest.raises(InvalidArgumentError, match=words):
        said(open_generator(folder[1]), ids, **{**asked, **change})


@pytest.mark.parametrize(
    ("option", "words"),
    [({"quantize": "int8"}, "add up from frame to frame"), ({"layout": "transformers.js"}, "one file")],
)
def test_what_nothing_proves_is_refused(option, words, tmp_path):
    with pytest.raises(InvalidArgumentError, match=words):
        export_folder(speaker(), tmp_path / "out", **option)


def test_folders_that_write_tokens_and_folders_that_speak_name_each_others_call(folder):
    with pytest.raises(InvalidArgumentError, match="call generate_speech"):
        open_generator(folder[1]).generate(torch.tensor([[5, 6]]))
    with pytest.raises(InvalidArgumentError, match=r"call generate\(\)"):
        open_generator(exported("t5")[1]).generate_speech(torch.tensor([[5, 6]]), numbers(1, 12))
