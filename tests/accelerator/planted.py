"""Faults that tests plant in files before their proof, for the page of mutants: what is planted, and the test."""

_TEST = "tests/flatten/model_folder/test_explain_folder.py::test_the_standard_proof_finds"

FAULTS = {
    what: f"{_TEST}[{what}]"
    for what in ("a wrong axis", "a lost window", "a permuted head", "a rounded weight", "a stale mask")
}
