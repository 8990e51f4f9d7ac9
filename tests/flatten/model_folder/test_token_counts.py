"""Tokens of a folder next to those of the model: counted as they are, excused at ties, and judged by a share."""

import dataclasses
import shutil

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import ByT5Tokenizer

from tests.flatten.export.trained_model import trained_model
from yobx_flatten import export_folder, open_model, verify_folder
from yobx_flatten.generate.settings import GenerationSettings
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.texts import CHATS, chat_prompts
from yobx_flatten.model_folder.verify import count_tokens
from yobx_flatten.storage.cases import StoredCase, load_case

MODEL = torch.tensor([[7, 1, 2, 3, 0, 9], [7, 4, 5, 6, 4, 5]])  # a prompt of one token; 0 ends a row, 9 fills it
CLEAR, TIE = 5.0, 1e-5


@dataclasses.dataclass
class Fixed:
    """A generator that returns tokens which are written here; read step by step, its scores choose them, too."""

    tokens: torch.Tensor
    settings: GenerationSettings = dataclasses.field(default_factory=lambda: GenerationSettings(eos_token_ids=(0,)))

    def generate(self, input_ids, **_options):
        """Return the tokens, as processors of scores leave them."""
        read = input_ids
        for place in range(1, self.tokens.shape[1]):
            scores = torch.nn.functional.one_hot(self.tokens[:, place], 10).float()
            for process in self.settings.processors:
                scores = process(read, scores)
            read = torch.cat([read, scores.argmax(-1)[:, None]], dim=1)
        return read


def _case(margins=None) -> StoredCase:
    outputs = {"sequences": MODEL, "new_tokens": 5}
    if margins is not None:
        outputs["margins"] = margins
    return StoredCase({"input_ids": MODEL[:, :1]}, outputs, "chat")


def _margins(**tied) -> torch.Tensor:
    margins = torch.full(MODEL.shape, CLEAR)
    margins[:, 0] = torch.inf
    for row, place in tied.values():
        margins[row, place] = TIE
    return margins


def test_tokens_that_differ_are_all_counted():
    """Two of nine; what fills the row that ended is no token, whatever stands there."""
    found = torch.tensor([[7, 1, 2, 3, 0, 8], [7, 4, 5, 1, 1, 5]])
    count = count_tokens(Fixed(found), _case(_margins()), 1e-4)
    assert (count.tokens, count.different, count.excused, count.ok) == (9, 2, 0, False)
    assert str(count) == "2 of 9 tokens differ"


def test_tokens_after_a_tie_are_counted_and_excused():
    """The scores of the model at the first of them are closer than rounding; in the other row they are not."""
    found = torch.tensor([[7, 1, 3, 3, 0, 8], [7, 4, 5, 1, 1, 5]])
    count = count_tokens(Fixed(found), _case(_margins(one=(1, 3))), 1e-4)
    assert (count.different, count.excused, count.ok) == (3, 2, False)
    both = count_tokens(Fixed(found), _case(_margins(one=(1, 3), other=(0, 2))), 1e-4)
    assert (both.different, both.excused, both.ok) == (3, 3, True)
    assert str(both) == "3 of 9 tokens differ, 3 of them excused: after a tie of two scores within float rounding"


def test_a_folder_without_margins_excuses_nothing():
    found = MODEL.clone()
    found[1, 2] = 1
    assert count_tokens(Fixed(found), _case(), 1e-4).ok is False
    assert count_tokens(Fixed(MODEL), _case(), 1e-4).ok is True


@pytest.mark.parametrize(("wrong", "ok"), [(2, True), (3, False)])
def test_rounded_weights_are_judged_by_the_share_that_agrees_after_the_same_text(wrong, ok):
    """Seven of nine are above 0.75, and six are not; the tokens are those chosen after the model's own text."""
    found = MODEL.clone()
    found[1, 1 : 1 + wrong] = 8
    count = count_tokens(Fixed(found), _case(_margins()), 1e-4, 0.75)
    assert count.agreed == pytest.approx((9 - wrong) / 9)
    assert count.ok is ok
    assert f"{wrong} of 9 tokens differ after the model's own text: " in str(count)


def test_rounded_weights_that_end_before_the_model_does_choose_no_token_there():
    found = MODEL[:, :4]
    count = count_tokens(Fixed(found), _case(_margins()), 1e-4, 0.75)
    assert (count.different, count.ok) == (3, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "out"
    export_folder(trained_model(), path, quantize="int4")
    return path


def test_the_stated_count_is_that_of_one_call_for_the_whole_text(folder):
    """Next to the text of model.generate itself, which the file reads in one call, and not what the folder stored."""
    case = load_case(folder / "cases/generate.case")
    with torch.no_grad():
        expected = trained_model().generate(**case.inputs, max_new_tokens=40, do_sample=False)
    mask = torch.cat([case.inputs["attention_mask"], torch.ones(len(expected), 40).long()], 1)
    scores = open_model(folder)(input_ids=expected, attention_mask=mask).logits
    (check,) = [check for check in verify_folder(folder).checks if check.file == "generate"]
    assert check.ok
    differs = scores[:, 8:-1].argmax(-1) != expected[:, 9:]
    assert check.difference == check.tokens.different == int(differs.sum())
    assert check.tokens.tokens == expected[:, 9:].numel()
    assert "agree, at least 40% have to" in " ".join(check.cells())


@pytest.mark.parametrize("broken", ["a matrix of zeros", "scales of other rows"])
def test_a_broken_file_fails_where_it_generates(folder, tmp_path, broken):
    """A head whose scales are zero, or whose bits and zero points are those of the next row: the structure is right."""
    path = tmp_path / "broken"
    shutil.copytree(folder, path)
    model = onnx.load(path / "model.onnx")
    parts = {tensor.name: tensor for tensor in model.graph.initializer}
    bits, scales, points = ([n.input for n in model.graph.node if n.op_type == "MatMulNBits"][-1])[1:4]
    for name in (scales,) if broken == "a matrix of zeros" else (bits, points):
        values = numpy_helper.to_array(parts[name])
        size = len(values) // 259  # of a row, where all of them are in one axis
        made = 0 * values if broken == "a matrix of zeros" else numpy.roll(values, size, axis=0)
        parts[name].CopyFrom(numpy_helper.from_array(made, name))
    onnx.save(model, path / "model.onnx")
    checks = {check.file: check for check in verify_folder(path).checks}
    assert not checks["generate"].ok
    assert checks["generate"].tokens.agreed < 0.4


def _tokenizer(folder, template="{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}\n"):
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_chats_are_prompts_in_the_template_of_the_tokenizer(tmp_path):
    tokenizer, model = _tokenizer(tmp_path / "chat"), small_model("llama")
    model.config.max_position_embeddings = 512
    prompts = chat_prompts(model, tmp_path / "chat", 2)
    row, mask = prompts["input_ids"][0], prompts["attention_mask"][0]
    assert tokenizer.decode(row[mask.bool()]).strip() == "<user>What is the capital of France?"
    assert mask.tolist() == sorted(mask.tolist())
    assert chat_prompts(model, None, 2) is None
    _tokenizer(tmp_path / "plain", None)
    assert chat_prompts(model, tmp_path / "plain", 2) is None
    _tokenizer(tmp_path / "faulty", "{{ raise_exception('no users') }}")
    assert chat_prompts(model, tmp_path / "faulty", 2) is None
    model.config.max_position_embeddings = 60
    assert chat_prompts(model, tmp_path / "chat", 2) is None


@pytest.mark.slow  # exports a model, and generates 500 tokens
def test_a_quantised_folder_with_a_template_is_compared_with_chats_of_the_model(tmp_path):
    model = trained_model()
    _tokenizer(tmp_path / "source")
    before = model.config.max_position_embeddings
    model.config.max_position_embeddings = max(before, 512)
    try:
        done = export_folder(model, tmp_path / "out", quantize="int8", source=tmp_path / "source")
    finally:
        model.config.max_position_embeddings = before
    assert (tmp_path / "out" / CHATS).exists()
    (check,) = [check for check in done.verified.checks if "chats" in check.case]
    assert check.ok
    assert check.tokens.tokens == 10 * 50
    assert check.tokens.allowed == 0.9
