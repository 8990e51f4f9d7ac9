"""Folders of encoders: pooled sentences, padded sound, and texts longer than a branch of the model's code."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.flatten.model_folder.exported_folders import made, run_file
from tests.models import SIZES
from yobx_flatten import GenerationError, ModelSourceError, export_folder, export_program, open_model
from yobx_flatten.model_folder.pieces.tasks import pieces_for, plain_pieces
from yobx_flatten.model_folder.pieces.text import Split
from yobx_flatten.model_folder.sentence import EMBEDDING, Pooling, copy_modules, read_modules
from yobx_flatten.model_folder.source.configuration import small_model

HIDDEN = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


def by_hand(tokens):
    places = torch.arange(1.0, len(tokens) + 1)[:, None]
    return {
        "cls": tokens[0],
        "max": tokens.max(0).values,
        "mean": tokens.mean(0),
        "mean_sqrt_len_tokens": tokens.sum(0) / len(tokens) ** 0.5,
        "weightedmean": (tokens * places).sum(0) / places.sum(),
        "lasttoken": tokens[-1],
    }


def test_a_row_is_pooled_over_its_own_tokens():
    rows = [by_hand(row[: int(mask.sum())]) for row, mask in zip(HIDDEN, MASK, strict=True)]
    for mode in rows[0]:
        assert torch.allclose(Pooling([mode])(HIDDEN, MASK), torch.stack([row[mode] for row in rows]), atol=1e-6), mode
    assert torch.equal(Pooling(["lasttoken"])(HIDDEN, MASK.flip(1)), HIDDEN[:, -1])  # as decoders are padded


MEAN = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write_modules(folder, kinds, **contents):
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds, 1))]
    types = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", *kinds)]
    listed = [
        {"idx": n, "name": str(n), "path": p, "type": t} for n, (p, t) in enumerate(zip(paths, types, strict=True))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(listed))
    for path, kind in zip(paths[1:], kinds, strict=True):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(contents.get(kind, {})))
    return folder


@pytest.mark.slow
def test_the_file_returns_the_embedding_and_the_folders_are_copied(tmp_path):
    trained = small_model("bert")  # with a head, as many such folders are
    model = trained.bert
    trained.save_pretrained(tmp_path / "st")
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    dense = {"in_features": 128, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    folder = write_modules(tmp_path / "st", ["Pooling", "Dense", "Normalize"], Pooling=pooling, Dense=dense)
    linear = torch.nn.Linear(128, 8)
    held = {f"linear.{name}": value.detach() for name, value in linear.named_parameters()}
    save_file(held, folder / "2_Dense/model.safetensors")
    export_folder(folder, tmp_path / "out")
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "3_Normalize/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    ids = torch.randint(4, 258, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with torch.no_grad():
        hidden = model(ids, attention_mask=mask)[0]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        wanted = torch.nn.functional.normalize(torch.tanh(linear(torch.cat([hidden[:, 0], mean], dim=-1))), dim=-1)
    found = open_model(tmp_path / "out")(input_ids=ids, attention_mask=mask)
    assert float((found[EMBEDDING] - wanted).abs().max()) < 1e-5
    assert float((found.last_hidden_state - hidden)[mask.bool()].abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("kinds", "contents", "why"),
    [
        (["LSTM"], {}, "module LSTM at place 1"),
        (["Pooling"], {}, "Pooling by nothing"),
        (["Pooling"], {"pooling_mode": "attention"}, "Pooling by attention"),
        (["Pooling"], {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt=false"),
        (["Normalize"], {}, "module Normalize at place 1"),
    ],
)
def test_a_module_that_is_not_known_is_named(tmp_path, kinds, contents, why):
    found = read_modules(write_modules(tmp_path / "st", kinds, **dict.fromkeys(kinds, contents)))
    assert isinstance(found, str)
    assert why in found


def test_modules_lead_to_no_other_folder(tmp_path):
    folder = write_modules(tmp_path / "st", ["Pooling"], Pooling={"pooling_mode_mean_tokens": True})
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../other"
    (folder / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError):
        read_modules(folder)


@pytest.mark.parametrize("sizes", [(60_000, 60_000), (8, -3), (10**9, 10**9), (16, 8)])
def test_sizes_that_the_weights_of_a_module_do_not_have_are_refused(tmp_path, sizes):
    """Before memory is taken: 60,000 by 60,000 numbers are 14 GB."""
    dense = {"in_features": sizes[1], "out_features": sizes[0], "activation_function": "torch.nn.Tanh"}
    kinds = ["Pooling", "Dense"]
    folder = write_modules(tmp_path / "st", kinds, Pooling={"pooling_mode_mean_tokens": True}, Dense=dense)
    save_file({"linear.weight": torch.rand(8, 16), "linear.bias": torch.rand(8)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(ModelSourceError, match=r"holds tensors of sizes .*\(8, 16\).*config\.json states"):
        read_modules(folder)


@pytest.mark.parametrize("linked", ["1_Pooling/notes.txt", "1_Pooling/config.json", "modules.json"])
def test_a_link_out_of_a_folder_of_modules_is_not_followed(tmp_path, linked):
    """A private file of the user would be copied next to what is published."""
    folder = write_modules(tmp_path / "st", ["Pooling"], Pooling={"pooling_mode_mean_tokens": True})
    held = (folder / linked).read_text() if (folder / linked).exists() else "mine"
    (tmp_path / "private").write_text(held)
    (folder / linked).unlink(missing_ok=True)
    (folder / linked).symlink_to(tmp_path / "private")
    with pytest.raises(ModelSourceError, match="is a link to"):
        copy_modules(folder, tmp_path / "out")
    assert not list(tmp_path.glob("out/**/notes.txt"))


def listener(norm):
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    layers |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**SIZES, **layers, vocab_size=40, feat_extract_norm=norm, pad_token_id=0)
    return made(transformers.Wav2Vec2ForCTC, config)


@pytest.mark.slow
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
    found = run_file(tmp_path / "out", {"input_values": sound, "attention_mask": mask})["logits"]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    # with a norm of groups, which was trained without a mask, it has none
    (piece,) = plain_pieces(listener("group"))
    assert list(piece.kwargs) == ["input_values"]


@pytest.mark.slow
def test_a_length_at_which_the_code_goes_another_way_is_stated(tmp_path):
    """BigBird attends to all tokens of short texts and to blocks of long ones: a file does the first."""
    sizes = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 256, "vocab_size": 96}
    model = made(transformers.BigBirdModel, transformers.BigBirdConfig(**SIZES, **sizes))
    done = export_folder(model, tmp_path / "out", proof="sample")
    assert "input_ids.shape[1] is 28 at most" in str(done.reports["model.onnx"])
    # none of a `Dim` that was asked for, and of the positions of BERT, which itself stops above them
    rows = torch.export.Dim("rows", min=2, max=9)
    report = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), dynamic_shapes=({0: rows},)).report
    assert "at most" not in str(report)
    config = transformers.BertConfig(**SIZES, vocab_size=96, max_position_embeddings=40)
    ids = torch.ones(2, 7, dtype=torch.int64)
    report = export_program(made(transformers.BertModel, config), kwargs={"input_ids": ids}, cases=[]).report
    assert "at most" not in str(report)


@pytest.mark.slow
def test_a_model_of_one_row_names_the_option_for_it():
    """A classifier whose configuration states no padding takes one row at a time."""
    config = transformers.LlamaConfig(**SIZES, vocab_size=96, num_key_value_heads=2, num_labels=3)
    model = made(transformers.LlamaForSequenceClassification, config)
    with pytest.raises(GenerationError, match=r"no padding token.*batch=1\. Export"):
        pieces_for(model, "auto")
    assert pieces_for(model, "auto", Split(1))[0] == "text-classification"


@pytest.mark.slow
def test_all_calls_of_a_file_have_the_same_inputs():
    """Funnel: whether types of tokens matter was asked anew for each size, and the answers differed."""
    widths = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1], "num_decoder_layers": 1}
    (piece,) = plain_pieces(made(transformers.FunnelModel, transformers.FunnelConfig(**widths, vocab_size=96)))
    assert {tuple(case.kwargs) for case in piece.cases} == {tuple(piece.kwargs)}
