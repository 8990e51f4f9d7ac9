"""Tests of roundpipe_runtime.huggingface.cutting: the example that is made up, the report, and errors."""

import pickle

from torch import nn

from roundpipe_runtime.huggingface import CutError, CutReport, Equivalence
from roundpipe_runtime.huggingface.adapters import example_inputs, text_config, without_cache
from tests.runtime.huggingface.hf_small import Toy, hf_model


def test_an_example_has_padding_and_two_rows():
    """One row is padded, so that the mask is one; the other is not."""
    made = example_inputs(hf_model("llama"))
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, 12)
    assert made["attention_mask"].sum(1).tolist() == [9, 12]


def test_an_example_has_what_the_forward_takes():
    assert set(example_inputs(Toy())) == {"input_ids"}
    assert set(example_inputs(hf_model("seq2seq:t5"))) == {"input_ids", "attention_mask", "decoder_input_ids"}


def test_models_are_asked_for_no_cache():
    model = hf_model("llama")
    assert without_cache(model, {"a": 1}) == {"a": 1, "use_cache": False}
    assert without_cache(model, {"use_cache": True}) == {"use_cache": True}
    assert without_cache(Toy(), {}) == {}


def test_the_configuration_of_text():
    model = hf_model("image:llava")
    assert text_config(model) is model.config.text_config
    assert text_config(nn.Linear(1, 1)) is None


def test_a_report_in_words():
    report = CutReport(
        "Model",
        ("layers",),
        ("phase 0", "layers.0", "layers.1", "phase 1"),
        (1_000_000, 2_000_000, 2_000_000, 500_000),
        Equivalence(0.0, 1.5e-8, "head.weight", 12),
        (("structure", "no way"),),
    )
    assert (report.phases, report.is_whole) == (2, False)
    assert str(report).splitlines() == [
        "Model: 4 pieces, 2 calls of layers in layers, 2 phases",
        "largest piece: 2 MB of 5.5 MB",
        "on the example: outputs differ by 0.0e+00, the gradients of 12 parameters by 1.5e-08",
        "not split in another way, structure: no way",
    ]


def test_errors_survive_a_process():
    error = pickle.loads(pickle.dumps(CutError("copy", "cannot be copied")))
    assert (error.reason, str(error)) == ("copy", "cannot be copied")
