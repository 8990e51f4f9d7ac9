"""Tests of roundpipe_runtime.huggingface.cutting.check and .errors."""

import pickle

from roundpipe_runtime.huggingface import CutError, CutReport, Equivalence


def test_a_report_in_words():
    """Pieces, the largest of them, the errors, and what was tried in vain."""
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
    """The reason is there after pickling."""
    error = pickle.loads(pickle.dumps(CutError("copy", "cannot be copied")))
    assert (error.reason, str(error)) == ("copy", "cannot be copied")
