"""A transcript begins as Whisper's own generate begins it: with the language that is detected, or stated."""

import pytest
import torch

from tests.flatten.generate.listeners import listener, stated
from yobx_flatten import InvalidArgumentError, export_folder, open_generator

SOUND = torch.randn(6, 16, 100, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model, folder = listener(), tmp_path_factory.mktemp("spoken") / "out"
    assert export_folder(model, folder, proof="sample").verified.ok
    return model, folder


@pytest.mark.slow
def test_the_language_is_detected_for_each_row(exported):
    model, folder = exported
    model.generation_config = stated(lang_to_id={f"<|{token}|>": token for token in range(20, 180)})
    model.generation_config.save_pretrained(folder)
    many = torch.randn(200, 16, 100, generator=torch.Generator().manual_seed(2)).cumsum(-1)
    heard = model.detect_language(many)
    rows = [int((heard == language).nonzero()[0]) for language in heard.unique()]
    assert len(rows) > 1, "one language: no test"
    found = open_generator(folder).generate(input_features=many[rows], max_new_tokens=9)
    assert torch.equal(found, model.generate(many[rows], max_new_tokens=9))


@pytest.mark.slow
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
def test_what_is_stated_is_the_prompt(entries, exported):
    model, folder = exported
    model.generation_config = stated(**entries)
    if entries.get("lang_to_id", 0) is None:
        del model.generation_config.lang_to_id
    model.generation_config.save_pretrained(folder)
    limit = {} if "max_length" in entries else {"max_new_tokens": 9}
    found = open_generator(folder).generate(input_features=SOUND, **limit)
    assert torch.equal(found, model.generate(SOUND, **limit))


@pytest.mark.slow
def test_a_language_that_the_model_does_not_have_is_refused(exported):
    model, folder = exported
    model.generation_config = stated(language="xx")
    model.generation_config.save_pretrained(folder)
    with pytest.raises(InvalidArgumentError, match="xx"):
        open_generator(folder).generate(input_features=SOUND)
