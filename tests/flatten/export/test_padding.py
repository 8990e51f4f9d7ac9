"""Positions that the attention mask excludes: left out of the comparison, and said so; all others are compared."""

import re

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import make_model
from yobx_flatten import Case, ReplayError, export_onnx, export_program
from yobx_flatten.export.proof.replay import Padding

pytestmark = pytest.mark.slow

WORDS = ["Beautiful", "is", "better", "than", "ugly"]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0, "[PAD]": 1} | {word: 2 + place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def test_what_a_tokenizer_returns_is_exported_and_says_what_was_left_out(tmp_path):
    model = make_model("llama")
    inputs = dict(_tokenizer()("Beautiful is better", return_tensors="pt"))
    report = export_onnx(model, kwargs=inputs, path=tmp_path / "a.onnx").report
    assert [case.left_out[0] for case in report.cases if "padded" in case.case] == ["logits"] * 2
    assert all(case.left_out == () for case in report.cases if "padded" not in case.case)
    shown = str(report)
    assert "positions that the attention mask excludes were not compared in logits, present" in shown
    assert "this file has no cache" in shown
    assert "export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...)" in shown

    batch = _tokenizer()(["Beautiful is better than ugly", "ugly is"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(["logits"], {key: value.numpy() for key, value in batch.items()})[0])
    with torch.no_grad():
        expected = model(**batch).logits
    read = batch["attention_mask"].bool()
    torch.testing.assert_close(found[read], expected[read], atol=1e-4, rtol=1e-4)


class Drifts(torch.nn.Module):
    """Adds a half where the mask has the number `where`, and only in a trace."""

    def __init__(self, where: int) -> None:
        super().__init__()
        self.where = where

    def forward(self, input_ids, attention_mask):
        wrong = (attention_mask == self.where) if torch.compiler.is_exporting() else torch.zeros_like(attention_mask)
        return {"logits": input_ids[:, :, None] * 1.0 + 0.5 * wrong[:, :, None]}


def test_a_difference_in_padding_is_none_and_one_beside_it_is():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    args = (torch.arange(6).reshape(2, 3), mask)
    report = export_program(Drifts(where=0), args, cases=[]).report
    assert report.cases[0].left_out == ("logits",)
    assert report.max_difference == 0.0
    with pytest.raises(ReplayError, match=r"largest difference 5\.0e-01"):
        export_program(Drifts(where=1), args, cases=[])


def test_positions_of_a_cache_that_was_given_are_compared():
    """They were not computed here: both sides got them. Those that were stay out for the rest of the loop."""
    padding = Padding()
    ids, keys = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 4, 5, 8)
    mask = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 1, 1, 1]])
    padding.next_call({"input_ids": ids, "attention_mask": mask})
    assert padding.blank("present.0.key", keys)[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1]
    assert padding.blank("logits", torch.ones(2, 2, 7))[:, :, 0].tolist() == [[0, 1], [1, 1]]
    longer = torch.cat([mask, torch.ones(2, 2, dtype=torch.int64)], dim=1)
    padding.next_call({"input_ids": ids, "attention_mask": longer})
    assert padding.blank("present.0.key", torch.ones(2, 4, 7, 8))[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1, 1, 1]
    # a layer that slides kept the last four, a static one has room for more
    assert padding.blank("present.0.value", torch.ones(2, 4, 4, 8))[0, 0, :, 0].tolist() == [0, 1, 1, 1]
    assert padding.blank("present.0.value", torch.ones(2, 4, 9, 8))[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert padding.left_out == ["present.0.key", "logits", "present.0.value"]


@pytest.mark.parametrize(
    ("name", "shape"), [("scores", (2, 3)), ("attentions.0", (2, 3, 3, 3)), ("pooled", (2, 8)), ("state", (3, 2, 8))]
)
def test_outputs_of_another_shape_are_compared_whole(name, shape):
    padding = Padding()
    padding.next_call(
        {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    )
    value = torch.ones(shape)
    assert padding.blank(name, value) is value


def test_the_mask_of_an_encoder_says_nothing_of_the_decoder():
    """`attention_mask` beside `decoder_input_ids` is of what the encoder read."""
    padding = Padding()
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 1, 1]])
    padding.next_call({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids})
    value = torch.ones(2, 3, 7)
    assert padding.blank("logits", value) is value


# -- models whose rows depend on the padding of others ----------------------------------------------------------------


class BothWays(torch.nn.Module):
    """Attends in both directions where nothing is padded, and in one where anything is; a trace follows the second."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(40, 8)

    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids)
        seen = attention_mask[:, None, :].bool()
        if torch.compiler.is_compiling() or not bool(attention_mask.all()):
            seen = seen & torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        return (hidden @ hidden.mT).masked_fill(~seen, -1e9).softmax(-1) @ hidden


class OfTheBatch(torch.nn.Module):
    """Divides each row by the tokens of the shortest one; a trace by those of the longest."""

    def forward(self, values, keep):
        count = keep.sum(1).amax() if torch.compiler.is_compiling() else keep.sum(1).amin()
        return (values * keep).sum(1) / count


class Wrong(torch.nn.Module):
    """What a trace of it returns is wrong for a reason of its own: rows know nothing of each other."""

    def forward(self, values, keep):
        return (values * keep).sum(1) * (2.0 if torch.compiler.is_compiling() else 1.0)


def of_words(padded):
    ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : 2 * padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def of_values(padded):
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = not padded
    return {"values": torch.arange(10.0).reshape(2, 5), "keep": keep}


SENTENCE = r"differs from the eager model \(.*\)\. The model itself changes a row's output by "


@pytest.mark.parametrize(("kind", "given"), [(BothWays, of_words), (OfTheBatch, of_values)])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_a_model_whose_rows_depend_on_the_padding_of_others_is_named_as_such(kind, given, first, export):
    module = kind().eval()
    both = [Case("a case", (), given(not first))]
    with pytest.raises(ReplayError, match=SENTENCE) as raised:
        export(module, (), given(first), cases=both)
    one, other = given(False), given(True)
    with torch.no_grad():
        moved = (module(**one) - module(**other)).abs()
    stated = float(re.search(r"changes a row's output by (\S+) ", str(raised.value)).group(1))
    assert stated == pytest.approx(float(moved[1:].max()), rel=0.1)


def test_a_difference_of_another_kind_is_not_blamed_on_padding():
    with pytest.raises(ReplayError) as raised:
        export_program(Wrong(), (), of_values(True))
    assert "when another row is padded" not in str(raised.value)
