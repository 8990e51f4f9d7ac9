"""Folders of strangers' models: nothing that a model reads is lost silently, nothing that it draws is fixed."""

import pytest
import torch
import transformers

from tests.flatten.model_folder.test_more_kinds import voice
from tests.flatten.model_folder.words import made
from tests.models import SIZES
from yobx_flatten import GenerationError, export_folder, export_onnx, open_generator, open_model
from yobx_flatten.errors import ReplayError
from yobx_flatten.model_folder.pieces.tasks import pieces_for
from yobx_flatten.model_folder.pieces.text import Split
from yobx_flatten.model_folder.source.configuration import small_config

pytestmark = pytest.mark.slow

PICTURE = {"image_size": 32, "patch_size": 8}


def git():
    config = transformers.GitConfig(vision_config={**SIZES, **PICTURE}, **SIZES, vocab_size=96)
    return made(transformers.GitForCausalLM, config)


def test_a_decoder_that_also_reads_pictures_is_refused_unless_its_text_is_asked_for():
    """GIT writes what is in a picture: its folder was one of text alone, without a word."""
    with pytest.raises(GenerationError, match=r"reads pixel_values besides input_ids.*task='text-generation'"):
        pieces_for(git(), "auto")
    task, (piece,) = pieces_for(git(), "text-generation", Split(proof="none"))
    assert task == "text-generation"
    assert any("also takes pixel_values" in remark for remark in piece.remarks)


@pytest.mark.parametrize(
    ("name", "kind", "lost"),
    [
        ("fuyu", "FuyuForCausalLM", "(pixel_values|image_patches)"),
        ("phi4_multimodal", "Phi4MultimodalForCausalLM", "audio_input_features"),
    ],
)
def test_pictures_and_sound_are_found_by_the_signature(name, kind, lost):
    with torch.device("meta"):
        model = getattr(transformers, kind)(transformers.AutoConfig.for_model(name))
    with pytest.raises(GenerationError, match=rf"reads .*{lost}"):
        pieces_for(model, "auto")


def test_data_that_a_decoder_does_not_get_are_named_in_the_report():
    """RoCBert reads how characters look and sound; a plain decoder has nothing of that kind."""
    model = made(transformers.RoCBertForCausalLM, transformers.RoCBertConfig(**SIZES, vocab_size=96, is_decoder=True))
    (piece,) = pieces_for(model, "auto", Split(proof="none"))[1]
    assert any("also takes input_shape_ids, input_pronunciation_ids" in remark for remark in piece.remarks)
    plain = made(transformers.LlamaForCausalLM, small_config("llama"))
    (piece,) = pieces_for(plain, "auto", Split(proof="none"))[1]
    assert not piece.remarks


def masked():
    widths = {f"decoder_{name}": value for name, value in SIZES.items()}
    return made(transformers.ViTMAEForPreTraining, transformers.ViTMAEConfig(**SIZES, **PICTURE, **widths))


def hashed(layers):
    sizes = {"vocab_size": 96, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4}
    sizes |= {"feed_forward_size": 48, "axial_pos_embds": False, "max_position_embeddings": 64, "num_buckets": 4}
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4}
    config = transformers.ReformerConfig(**sizes, **chunks, attn_layers=layers, is_decoder=False)
    return made(transformers.ReformerForSequenceClassification, config)


def loud():
    model = voice()
    model.noise_scale = 0.5
    return model


@pytest.mark.parametrize("make", [masked, lambda: hashed(["local", "lsh"]), loud], ids=["ViTMAE", "Reformer", "VITS"])
def test_a_model_that_draws_in_evaluation_is_refused_in_a_line(make):
    """Its program passed with the seed of the trace, and its stored cases failed with other numbers, in a table."""
    with pytest.raises(GenerationError, match=r"draws random numbers in evaluation.*export_onnx\(") as raised:
        pieces_for(make(), "auto")
    assert "\n" not in str(raised.value)


def test_what_is_drawn_and_not_used_is_no_reason(monkeypatch):
    """VITS without noise draws it and multiplies it by 0; torch's own generator stays as it was."""
    before = torch.get_rng_state()
    assert len(pieces_for(voice(), "auto")[1]) == 1
    assert torch.equal(before, torch.get_rng_state())


def test_a_video_has_frames(tmp_path):
    """Numbers of videos that no case has; they were given pictures, and refused."""
    config = transformers.VideoMAEConfig(**SIZES, **PICTURE, num_frames=4, num_labels=3)
    model = made(transformers.VideoMAEForVideoClassification, config)
    done = export_folder(model, tmp_path / "out", to="program")
    assert (done.task, done.verified.ok) == ("video-classification", True)
    videos = torch.randn(5, 4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(videos).logits
    torch.testing.assert_close(open_model(tmp_path / "out", trust=True)(videos).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_classifier_that_reads_its_end_token_is_a_file_of_any_number_of_rows(tmp_path):
    """BART's: the example had no end token; its program asserted for one row what follows from two."""
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    layers |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    layers |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
    sizes = {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.3, "num_labels": 3}
    model = made(transformers.BartForSequenceClassification, transformers.BartConfig(**layers, **sizes))
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == ("text-classification", True)
    assert "refuses some inputs by their values" in str(done.reports["model.onnx"])
    opened = open_model(tmp_path / "out")
    for rows, length in ((1, 33), (2, 13), (4, 6)):
        ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(rows))
        ids[:, -1] = 2
        ids[-1, -2:] = torch.tensor([2, 1])  # a padded row
        given = {"input_ids": ids, "attention_mask": ids.ne(1).long()}
        with torch.no_grad():
            wanted = model(**given).logits
        torch.testing.assert_close(opened(**given).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_decoder_that_reads_one_token_at_a_time_generates_as_its_model(tmp_path):
    """ProphetNet with a cache refuses several."""
    layers = {f"num_{side}_{what}": n for side in ("encoder", "decoder") for what, n in _LAYERS.items()}
    sizes = {"vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3}
    config = transformers.ProphetNetConfig(**layers, **sizes, max_position_embeddings=64, eos_token_id=None)
    model = made(transformers.ProphetNetForConditionalGeneration, config)
    assert export_folder(model, tmp_path / "out", to="program").verified.ok
    ids = torch.randint(3, 90, (4, 11), generator=torch.Generator().manual_seed(1))
    wanted = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(open_generator(tmp_path / "out", trust=True).generate(ids, max_new_tokens=9), wanted)


def test_sound_in_patches_is_a_spectrogram(tmp_path):
    """AST was given samples."""
    config = transformers.ASTConfig(**SIZES, max_length=32, num_mel_bins=16, patch_size=8, num_labels=3)
    model = made(transformers.ASTForAudioClassification, config)
    done = export_folder(model, tmp_path / "out", to="program")
    assert (done.task, done.verified.ok) == ("audio-classification", True)
    sound = torch.randn(5, 32, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(sound).logits
    torch.testing.assert_close(open_model(tmp_path / "out", trust=True)(sound).logits, wanted, atol=1e-4, rtol=1e-4)


_LAYERS = {"layers": 1, "attention_heads": 4}


def test_a_length_that_its_code_divides_by_names_the_way_for_one_length(tmp_path):
    """Reformer cuts a text into pieces of 4: a program of any length is refused by its proof, one of a length works."""
    model = hashed(["local", "local"])
    with pytest.raises(ReplayError, match=r"cannot be exported to model\.pt2 for all sizes.*dynamic_shapes=None"):
        export_folder(model, tmp_path / "out", to="program")
    ids = torch.randint(5, 90, (2, 8), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    report = export_onnx(model, kwargs=given, path=tmp_path / "one.onnx", dynamic_shapes=None).report
    assert report.max_difference < 1e-4


def test_an_encoder_in_training_mode_is_refused_with_the_line_to_type(tmp_path):
    """Its dropout draws; after a training that is the usual mistake."""
    model = transformers.BertModel(small_config("bert")).train()
    with pytest.raises(GenerationError, match=r"BertModel is in training mode.*\n    model\.eval\(\)"):
        export_folder(model, tmp_path / "out", proof="none")
    assert not (tmp_path / "out").exists()
