"""Tests of the kinds of models: what a sample of the cut matrix is spread over."""

import logging
from pathlib import Path

import pytest

from matrix.cut import choose, parse
from matrix.cut_cases import COLUMNS
from matrix.kinds import kind_of, quiet_sample
from matrix.results import Results, passes

RECORDED = Path(__file__).parent.parent / "docs" / "data" / "cut-5.24.0.json"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", ("causal",)),
        ("mixtral", ("causal", "experts")),
        ("mamba", ("causal", "states")),
        ("jamba", ("causal", "experts", "states")),
        ("gemma3n_text", ("causal", "shared keys")),
        ("seq2seq:t5", ("seq2seq",)),
        ("image:qwen3_5_moe", ("image", "experts", "states")),
        ("speech:whisper", ("speech",)),
        ("speech:dia", ("speech",)),
    ],
)
def test_a_kind_is_read_off_the_configuration(name, kind):
    assert kind_of(name) == kind


def test_what_has_no_small_configuration_is_a_kind_of_its_own(monkeypatch):
    """The matrix records why it is not built; a sample must not fail of it."""
    monkeypatch.setattr("matrix.kinds.make_config", lambda name: 1 / 0)
    assert kind_of("llama") == ("causal", "not built")


def test_the_phases_of_a_recorded_cut_are_part_of_the_kind(tmp_path):
    """A model whose stack runs again and again has more of them than others of its configuration."""
    recorded = Results(tmp_path / "cut.json", {}, "")
    recorded.types = {"llama": {"columns": {"cut": {"ok": True, "phases": 7}}}}
    assert kind_of("llama", recorded) == ("causal", "7 phases")
    assert kind_of("phi3", recorded) == ("causal",)


def test_the_logger_is_as_before_after_a_sample():
    before = logging.root.manager.disable
    assert quiet_sample(["a1", "a2", "b1"], lambda name: name[0], 2) == ["a1", "b1"]
    with pytest.raises(ZeroDivisionError):
        quiet_sample(["a"], lambda name: 1 / 0, 1)
    assert logging.root.manager.disable == before


def test_twenty_five_types_stand_for_every_kind_that_passed():
    chosen = choose(parse(["--all", "--sample", "25", "--against", str(RECORDED)]))
    recorded = Results.read(RECORDED)
    assert len(chosen) == 25
    assert all(passes(recorded.types[name], list(COLUMNS)) for name in chosen)
    kinds = [kind_of(name, recorded) for name in chosen]
    everything = {kind_of(name, recorded) for name, entry in recorded.types.items() if passes(entry, list(COLUMNS))}
    assert len(set(kinds)) == min(25, len(everything))
    words = {word for kind in kinds for word in kind}
    assert {"causal", "seq2seq", "image", "speech", "experts", "states", "shared keys", "9 phases"} <= words
    assert ("causal", "2 phases") in kinds
