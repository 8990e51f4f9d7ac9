"""Encoders of public reports: padded sound, texts longer than a branch of the model's code, rows without padding."""

import onnxruntime
import pytest
import torch
import transformers

from tests.flatten.model_folder.words import made
from tests.models import SIZES
from yobx_flatten import GenerationError, export_folder, export_program
from yobx_flatten.model_folder.pieces.tasks import pieces_for, plain_pieces
from yobx_flatten.model_folder.pieces.text import Split

pytestmark = pytest.mark.slow


def listener(norm):
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    layers |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**SIZES, **layers, vocab_size=40, feat_extract_norm=norm, pad_token_id=0)
    return made(transformers.Wav2Vec2ForCTC, config)


def test_padded_sound_is_heard_as_the_model_hears_it(tmp_path):
    """Wav2Vec2 with layer norms needs the mask that its processor returns; without, rows that end early are off."""
    model = listener("layer")
    assert export_folder(model, tmp_path / "out").task == "ctc"
    sound = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 1000, dtype=torch.int64)
    mask[1, 600:] = 0
    sound[1, 600:] = 0
    with torch.no_grad():
        wanted, without = model(sound, attention_mask=mask).logits, model(sound).logits
    assert (wanted - without).abs().max() > 1e-2
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"input_values": sound.numpy(), "attention_mask": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)


def test_sound_that_is_padded_by_zeros_has_no_mask():
    """Those with a norm of groups were trained without."""
    (piece,) = plain_pieces(listener("group"))
    assert list(piece.kwargs) == ["input_values"]


def test_a_length_at_which_the_code_goes_another_way_is_stated(tmp_path):
    """BigBird attends to all tokens of short texts and to blocks of long ones: a file does the first."""
    sizes = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 256, "vocab_size": 96}
    model = made(transformers.BigBirdModel, transformers.BigBirdConfig(**SIZES, **sizes))
    done = export_folder(model, tmp_path / "out", proof="sample")
    assert "input_ids.shape[1] is 28 at most" in str(done.reports["model.onnx"])


def test_a_bound_that_was_asked_for_or_of_a_table_is_no_note():
    """That of a `Dim`, and the positions of BERT, which itself stops above them."""
    rows = torch.export.Dim("rows", min=2, max=9)
    report = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), dynamic_shapes=({0: rows},)).report
    assert "at most" not in str(report)
    config = transformers.BertConfig(**SIZES, vocab_size=96, max_position_embeddings=40)
    ids = torch.ones(2, 7, dtype=torch.int64)
    report = export_program(made(transformers.BertModel, config), kwargs={"input_ids": ids}, cases=[]).report
    assert "at most" not in str(report)


def test_a_model_of_one_row_names_the_option_for_it():
    """A classifier whose configuration states no padding takes one row at a time."""
    config = transformers.LlamaConfig(**SIZES, vocab_size=96, num_key_value_heads=2, num_labels=3)
    model = made(transformers.LlamaForSequenceClassification, config)
    with pytest.raises(GenerationError, match=r"no padding token.*batch=1\. Export"):
        pieces_for(model, "auto")
    assert pieces_for(model, "auto", Split(1))[0] == "text-classification"


def test_all_calls_of_a_file_have_the_same_inputs():
    """Funnel: whether types of tokens matter was asked anew for each size, and the answers differed."""
    widths = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1], "num_decoder_layers": 1}
    (piece,) = plain_pieces(made(transformers.FunnelModel, transformers.FunnelConfig(**widths, vocab_size=96)))
    assert {tuple(case.kwargs) for case in piece.cases} == {tuple(piece.kwargs)}
