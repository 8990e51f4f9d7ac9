"""What a `generation_config.json` asks for is done by the files as `model.generate` does it."""

import json
import shutil

import pytest
import torch

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import GenerationSettings, OnnxGenerator, ProgramGenerator
from yobx_flatten.generate.settings import settings_of

pytestmark = pytest.mark.slow

TOKENS = 10
SOURCE = torch.randint(4, 259, (3, 9), generator=torch.Generator().manual_seed(7))
PADDED = torch.ones_like(SOURCE).index_put_((torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])), torch.tensor(0))


INPUTS = {"input_ids": SOURCE, "attention_mask": PADDED}


def said(model, rules):
    return model.generate(**INPUTS, max_new_tokens=TOKENS, do_sample=False, num_beams=1, **rules).tolist()


def generated(name, rules, folder, to="program"):
    model, made = exported(name, to)
    copy = shutil.copytree(made, folder / "copy")
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **rules}), encoding="utf-8")
    opened = OnnxGenerator(copy) if to == "onnx" else ProgramGenerator(copy, trust=True)
    return said(model, rules), opened.generate(**INPUTS, max_new_tokens=TOKENS).tolist()


FORCED = [("bart", "onnx"), ("bart", "program"), ("mbart", "onnx"), ("marian", "onnx")]


@pytest.mark.parametrize(("name", "to"), cases(FORCED, quick=[("bart", "onnx")]))
def test_folders_whose_last_token_is_forced_are_written(name, to, tmp_path):
    wanted, found = generated(name, {}, tmp_path, to)
    forced = exported(name, to)[0].generation_config.forced_eos_token_id
    assert forced is not None
    assert [row[-1] for row in wanted] == [forced] * 3
    assert found == wanted


def test_the_second_token_may_be_the_language(tmp_path):
    wanted, found = generated("mbart", {"forced_bos_token_id": 77}, tmp_path, "onnx")
    assert [row[1] for row in wanted] == [77] * 3
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("bart", {"forced_bos_token_id": 5, "begin_suppress_tokens": [176]}),
        ("bart", {"bad_words_ids": [[176]]}),
        ("bart", {"eos_token_id": 176, "min_length": 6}),
        ("bart", {"eos_token_id": 176, "min_new_tokens": 4}),
        ("bart", {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1}),
        ("bart", {"encoder_repetition_penalty": 1.9}),
        ("bart", {"remove_invalid_values": True, "suppress_tokens": [176]}),
        ("mistral", {"begin_suppress_tokens": "the first tokens"}),
        ("mistral", {"repetition_penalty": 5.0}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)
def test_a_rule_does_what_it_does_in_the_model(name, rules, tmp_path):
    plain = said(exported(name)[0], {})
    if "the first tokens" in rules.values():
        rules = {"begin_suppress_tokens": sorted({row[SOURCE.shape[1]] for row in plain})}
    wanted, found = generated(name, rules, tmp_path, "onnx")  # which open ten times as fast
    assert found == wanted
    assert wanted != plain


def test_padding_in_front_of_a_row_is_not_repeated(tmp_path):
    """What stands at padded places does not count for the penalty in transformers that leave it out."""
    rules = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
    wanted, found = generated("mistral", rules, tmp_path, "onnx")
    assert found == wanted


def test_rules_can_be_given_for_a_file_that_stands_alone():
    _, folder = exported("bart", "program")
    settings = GenerationSettings((1,), 0, 0, forced_bos_token_id=9, forced_eos_token_id=(8, 7))
    found = ProgramGenerator(folder, settings=settings, trust=True).generate(SOURCE, PADDED, max_new_tokens=4)
    assert found[:, [1, -1]].tolist() == [[9, 7]] * 3  # of two alike the first


def test_a_model_without_a_generation_configuration_keeps_its_rules_in_its_own():
    """As in folders of older versions, which transformers reads so, too."""
    assert settings_of({"forced_eos_token_id": 2}, {}).forced_eos_token_id == 2
    assert settings_of({"forced_eos_token_id": 2}, {"eos_token_id": 1}).forced_eos_token_id is None


def test_values_that_do_nothing_are_no_rules():
    """Most files state every entry; a loop of transformers is for those that ask for one."""
    plain = settings_of({}, {"guidance_scale": 1.0, "sequence_bias": None, "num_beam_groups": 1, "min_length": 0})
    assert (plain.has_rules, plain.other_loops) == (False, ())
    asked = settings_of({}, {"guidance_scale": 1.5, "max_time": 2.0})
    assert (asked.has_rules, asked.other_loops) == (True, ("max_time",))
