"""The page that is saved with a model, and the picture of its losses."""

import pytest

from roundpipe_runtime.fine_tune import EvalRecord, FineTuneError, StepRecord, model_card, save_curve
from tests.runtime import tiny_training as tiny


def records(count):
    """Losses that fall by one in each step, and one evaluation at the end."""
    steps = [StepRecord(n, float(count - n), 1, 1.0, 1e-3, 1.0, 1.0, None, None) for n in range(1, count + 1)]
    return [*steps, EvalRecord(count, 0.5, 1, 1.0)]


def test_a_card_states_data_losses_options_and_versions():
    """Options that were not given are left out."""
    pytest.importorskip("transformers")
    card = model_card(tiny.source(), records(3), data="a.txt", options={"batch": 4, "lora": None})
    assert card.startswith("---\nlibrary_name: transformers\n")
    lines = card.splitlines()
    for line in ("# Trained from random weights of tiny", "a.txt", "| 1 | 2.0000 |  |", "| 3 | 0.0000 | 0.5000 |"):
        assert line in lines
    assert "- batch: 4" in lines
    assert not any("lora" in line for line in lines)
    assert any(line.startswith("- torch: ") for line in lines)


def test_a_long_training_has_a_short_table():
    """The last step is in it."""
    pytest.importorskip("transformers")
    lines = model_card(tiny.source(), records(1001), data="x", options={}).splitlines()
    rows = [line for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) <= 13
    assert rows[-1] == "| 1001 | 0.0000 | 0.5000 |"


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_losses_are_drawn(tmp_path, name):
    pytest.importorskip("matplotlib")
    save_curve(records(5), tmp_path / name)
    assert (tmp_path / name).read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_another_suffix_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(FineTuneError, match=r"does not end in \.png, \.svg or \.pdf\. Change the ending: --plot"):
        save_curve(records(5), tmp_path / "a.doc")
