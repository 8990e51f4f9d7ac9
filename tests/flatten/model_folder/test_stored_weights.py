"""A folder whose weights are not those of its class is refused with their names, wherever a model is loaded from it."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from roundpipe_runtime.fine_tune import FineTuneError, model_source
from tests.flatten.model_folder.words import restate
from yobx_flatten import export_folder
from yobx_flatten.errors import InvalidArgumentError, ModelSourceError
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.open import open_model

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "missing": (lambda weights: weights.pop(MATRIX), f"lacks the weight {MATRIX} of LlamaForCausalLM"),
    "unused": (
        lambda weights: weights.update({"model.layers.1.mlp.gate_up.weight": torch.ones(3)}),
        "holds the weight model.layers.1.mlp.gate_up.weight, which LlamaForCausalLM does not have",
    ),
    "of another shape": (
        lambda weights: weights.update({MATRIX: torch.ones(48, 31)}),
        rf"{MATRIX} has shape \(48, 31\), but LlamaForCausalLM takes \(48, 32\)",
    ),
}
DOORS = {
    "loaded": lambda folder: find_model(str(folder)).load(),
    "streamed": lambda folder: open_model(find_model(str(folder)), dtype="float32", weights="stream", to="onnx"),
    "exported": lambda folder: export_folder(folder, folder.parent / "out"),
    "trained": lambda folder: model_source(folder).load(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_not_those_of_the_class_are_refused_by_name(change, door, llama):
    remove, message = CHANGES[change]
    _rewrite(llama, remove)
    choice = "unused" if change == "unused" else "random"
    with pytest.raises((ModelSourceError, FineTuneError), match=rf"(?s){message}.*unmatched.weights.*{choice}"):
        DOORS[door](llama)
    assert not (llama.parent / "out").exists()


def test_a_bert_as_it_was_published_is_exported_with_the_line_of_its_error(tmp_path):
    """Old names of norms and a stored range of positions are no difference; its second head is."""
    model = BertForPreTraining(BertConfig(**SIZES, max_position_embeddings=16))
    model.save_pretrained(tmp_path / "bert")
    restate(tmp_path / "bert/config.json", architectures=["BertForMaskedLM"])

    def published(weights):
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights[old] = weights.pop(name)
        weights["bert.embeddings.position_ids"] = torch.arange(16)[None]

    _rewrite(tmp_path / "bert", published)
    with pytest.raises(ModelSourceError) as raised:
        find_model(str(tmp_path / "bert")).load()
    message, line = str(raised.value).splitlines()
    assert "holds 4 weights, bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship" in message
    assert "position_ids" not in message
    assert line == '    unmatched_weights="unused" (--unmatched-weights unused)'
    found = find_model(str(tmp_path / "bert"))
    loaded = dataclasses.replace(found, unmatched_weights="unused").load().eval()
    assert isinstance(loaded, BertForMaskedLM)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).prediction_logits)


def test_a_head_that_only_the_configuration_states_is_refused(tmp_path):
    """A base model whose configuration names a class with a head."""
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    stated = {**config, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(stated), "utf-8")
    with pytest.raises(ModelSourceError, match=r"lacks 2 weights, classifier\.bias, classifier\.weight of BertFor"):
        find_model(str(tmp_path)).load()


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "model.bin"])
def test_weights_in_another_form_are_not_replaced_by_random_ones(name, llama):
    """Their folder would look like one without weights."""
    (llama / "model.safetensors").rename(llama / name)
    with pytest.raises(ModelSourceError, match=rf"contains {name}, but only safetensors and .*unmatched_weights"):
        find_model(str(llama)).load()


def test_a_gguf_file_in_a_folder_is_named_as_the_model_to_export(llama):
    """It has its own configuration and tokenizer, which may be others than the folder's."""
    (llama / "model.safetensors").rename(llama / "model.gguf")
    with pytest.raises(ModelSourceError, match=r"holds model\.gguf\. Pass the file: .*model\.gguf"):
        find_model(str(llama)).load()


def test_random_weights_of_a_folder_without_any_are_in_the_report(llama):
    (llama / "model.safetensors").unlink()
    done = export_folder(llama, llama.parent / "out", proof="none")
    assert any("weights are random" in note for note in done.reports["model.onnx"].remarks)


@pytest.mark.parametrize("weights", ["memory", "stream"])
def test_random_weights_on_purpose_are_named_in_the_report(weights, llama):
    stored = load_file(llama / "model.safetensors")
    _rewrite(llama, lambda weights: weights.pop(MATRIX))
    done = export_folder(
        llama, llama.parent / "out", proof="none", weights=weights, unmatched_weights="random", to="onnx"
    )
    assert any(MATRIX in remark and "random" in remark for remark in done.reports["model.onnx"].remarks)
    found = find_model(str(llama))
    object.__setattr__(found, "unmatched_weights", "random")
    one, other = (found.load().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in stored)
    assert all(torch.equal(one[name], stored[name]) for name in stored if name != MATRIX)
    assert not torch.equal(one[MATRIX], stored[MATRIX])


def test_leaving_weights_out_does_not_allow_random_ones(llama):
    """Two choices, of which the second includes the first."""
    _rewrite(llama, lambda weights: weights.update({"more": torch.ones(3)}))
    done = export_folder(llama, llama.parent / "out", proof="none", unmatched_weights="unused")
    assert any("more" in remark for remark in done.reports["model.onnx"].remarks)
    _rewrite(llama, lambda weights: weights.pop(MATRIX))
    with pytest.raises(ModelSourceError, match="lacks the weight"):
        export_folder(llama, llama.parent / "other", proof="none", unmatched_weights="unused")


@pytest.mark.parametrize("weights", ["memory", "stream"])
def test_what_older_versions_stored_and_ties_are_no_differences(weights, tmp_path):
    """A tied head is not in the file; computed buffers were."""
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    opened = open_model(find_model(str(tmp_path)), dtype="float32", weights=weights, to="onnx")
    assert not [remark for remark in opened.remarks if "inv_freq" in remark]


def test_a_loaded_model_takes_no_such_option(llama, tmp_path):
    model = BertForSequenceClassification(BertConfig(**SIZES)).eval()
    with pytest.raises(InvalidArgumentError, match="unmatched_weights='random' is for a model given by name"):
        export_folder(model, tmp_path / "out", unmatched_weights="random")


def test_an_unknown_choice_names_the_choices(llama):
    with pytest.raises(InvalidArgumentError, match="'refuse', 'unused', 'random', found 'yes'"):
        export_folder(llama, llama.parent / "out", unmatched_weights="yes")
