"""The task decides which class of a checkpoint is exported, as the automatic classes of transformers do."""

import json

import pytest
import torch
import transformers

from tests.models import SIZES
from yobx_flatten import export_folder, open_generator, open_model
from yobx_flatten.errors import GenerationError, InvalidArgumentError, ModelSourceError

SMALL = {**SIZES, "vocab_size": 99, "initializer_range": 0.2}
IDS = torch.tensor([[5, 9, 11, 42, 7], [8, 3, 17, 60, 98]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def stored(tmp_path, kind, config):
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("kind", "config", "base", "more", "asked"),
    [
        ("BertForMaskedLM", "BertConfig", "BertModel", {}, {"task": "feature-extraction"}),
        ("RobertaForTokenClassification", "RobertaConfig", "RobertaModel", {}, {"task": "feature-extraction"}),
        ("BertForPreTraining", "BertConfig", "BertModel", {}, {}),
        ("ElectraForPreTraining", "ElectraConfig", "ElectraModel", {"embedding_size": 32}, {}),
        ("AlbertForPreTraining", "AlbertConfig", "AlbertModel", {"embedding_size": 16}, {}),
    ],
)
def test_embeddings_of_a_checkpoint_with_a_head_are_those_of_automodel(tmp_path, kind, config, base, more, asked):
    """By the task, or of a checkpoint of pretraining; scores of the head were exported under the name of features."""
    folder = stored(tmp_path, kind, getattr(transformers, config)(**SMALL | more, pad_token_id=1))
    with torch.no_grad():
        wanted = transformers.AutoModel.from_pretrained(folder).eval()(IDS, attention_mask=MASK).last_hidden_state
    done = export_folder(folder, tmp_path / "out", **asked, proof="sample")
    assert done.task == "feature-extraction"
    assert f"{base} was exported for feature-extraction; the model is stored as a {kind}." in str(
        done.reports["model.onnx"]
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [base]
    found = open_model(tmp_path / "out")(IDS, attention_mask=MASK)
    assert "logits" not in found
    torch.testing.assert_close(found.last_hidden_state[MASK.bool()], wanted[MASK.bool()], atol=1e-4, rtol=1e-4)


def test_a_base_with_tied_scores_writes_text_where_the_task_asks_for_it(tmp_path):
    """GPT2Model holds all weights of its language model; the folder was refused."""
    folder = stored(tmp_path, "GPT2Model", transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=4))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    export_folder(folder, tmp_path / "out", task="text-generation", to="program", proof="sample")
    found = open_generator(tmp_path / "out", trust=True).generate(IDS, max_new_tokens=4)
    assert torch.equal(torch.as_tensor(found), wanted.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize(
    ("kind", "task", "line"),
    [
        ("BertForMaskedLM", "text-classification", "lacks .* of BertForSequenceClassification, which would be random"),
        ("BertModel", "token-classification", "lacks .* of BertForTokenClassification, which would be random"),
        ("BertForMaskedLM", "text-generation", "is for fill-mask, not for text-generation"),
        ("BertForMaskedLM", "depth-estimation", "is for fill-mask, not for depth-estimation"),
        ("BertModel", "image-classification", "is for feature-extraction, not for image-classification"),
    ],
)
def test_a_head_that_the_checkpoint_lacks_is_refused_by_name(tmp_path, kind, task, line):
    """Any encoder was exported under the name of any task."""
    folder = stored(tmp_path, kind, transformers.BertConfig(**SMALL))
    with pytest.raises((ModelSourceError, InvalidArgumentError), match=line):
        export_folder(folder, tmp_path / "out", task=task)
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_of_another_class_names_the_base_which_exports(tmp_path):
    """The class of an object is the caller's choice, so the line names what to pass."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).eval()
    stated = list(model.config.architectures or [])
    with pytest.raises(
        InvalidArgumentError, match=r"export_folder\(model\.base_model, \.\.\., task='feature-extraction'"
    ):
        export_folder(model, tmp_path / "out", task="feature-extraction")
    with pytest.raises(InvalidArgumentError, match="is for feature-extraction, not for text-classification"):
        export_folder(model.base_model, tmp_path / "out", task="text-classification")
    export_folder(model.base_model, tmp_path / "out", task="feature-extraction", to="program", proof="sample")
    with pytest.raises(
        GenerationError, match=r"out is for feature-extraction: it does not generate\. Call it:\n +open_m"
    ):
        open_generator(tmp_path / "out", trust=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertModel"]
    assert list(model.config.architectures or []) == stated


@pytest.mark.parametrize(
    ("kind", "config"), [("ElectraForPreTraining", "ElectraConfig"), ("BertForNextSentencePrediction", "BertConfig")]
)
def test_a_loaded_model_with_a_head_of_no_task_is_refused_for_embeddings(tmp_path, kind, config):
    """Its class is not one of the task's names, and its scores were exported as features."""
    model = getattr(transformers, kind)(getattr(transformers, config)(**SMALL)).eval()
    with pytest.raises(InvalidArgumentError, match=rf"A {kind} returns the scores of its head.*\n.*model\.base_model"):
        export_folder(model, tmp_path / "out", task="feature-extraction")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "config"), [("ElectraForPreTraining", "ElectraConfig"), ("BertForNextSentencePrediction", "BertConfig")]
)
def test_a_loaded_model_keeps_its_head_and_the_report_names_it(tmp_path, kind, config):
    model = getattr(transformers, kind)(getattr(transformers, config)(**SMALL)).eval()
    done = export_folder(model, tmp_path / "out", to="program", proof="none")
    assert f"{kind} was exported, with its head. For embeddings, export model.base_model." in str(
        done.reports["model.pt2"]
    )
    base = export_folder(model.base_model, tmp_path / "base", to="program", proof="none")
    assert "with its head" not in str(base.reports["model.pt2"])
