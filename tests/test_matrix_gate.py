"""`--against` of every matrix: what passed before and anything but passed now ends the run with 1."""

import json

import pytest

from matrix import __main__ as whole
from matrix import command, cut, genai, runtimes
from matrix.gate import judge
from matrix.results import Results, regressions
from matrix.runner import Limits, Runner

from .test_matrix_fakes import load_fake, run_fake

OK, FAILED = {"ok": True}, {"ok": False, "why": "ValueError: axis 3"}
NOT_TRIED = {"ok": None, "why": "NoCacheError: takes no cache"}
TABLES = {
    "matrix": (whole.parse, "built"),
    "cut matrix": (cut.parse, "built"),
    "runtimes": (runtimes.parse, "program"),
    "folders of runtimes": (lambda typed: runtimes.parse([*typed, "--folders"]), "OpenVINO folder"),
    "genai": (genai.parse, "folder"),
}


@pytest.fixture
def results(tmp_path):
    def made(**types):
        made = Results(tmp_path / "results.json", {"torch": "2.13"}, "yobx_flatten")
        made.types = {kind: {"columns": columns} for kind, columns in types.items()}
        return made

    return made


@pytest.fixture(params=TABLES)
def table(request):
    if request.param == "genai":
        pytest.importorskip("onnxruntime_genai")
    parse, column = TABLES[request.param]
    return lambda *typed: parse([*typed, "--columns", column]), column


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (OK, []),
        (FAILED, ["llama, {}: ValueError: axis 3"]),
        (NOT_TRIED, ["nothing was tried, of 1 types: NoCacheError: takes no cache"]),
        (NOT_TRIED, ["llama, {}: was not tried: NoCacheError: takes no cache"]),
    ],
)
def test_only_passed_is_as_good_as_passed(table, result, said, results):
    parse, column = table
    options = parse("--only", "llama") if column != "OpenVINO folder" else parse()
    options.only = ["llama"]
    found = judge(results(llama={column: result}), results(llama={column: OK}), ["llama"], options).worse
    assert (found == []) if not said else said[0].format(column) in found


def test_columns_and_types_without_a_result_are_worse_and_a_column_that_is_not_tried_states_why(results):
    found = results(llama={"built": OK, "onnx": {"ok": None}})
    recorded = results(llama={"built": OK, "onnx": FAILED})
    assert regressions(found, recorded, ["llama"]) == ["llama, onnx: was not tried: no reason is recorded"]
    with pytest.raises(ValueError, match="gpt2, onnx: a column that is not tried states why"):
        found.record("gpt2", {"onnx": {"ok": None, "why": ""}}, "state")
    assert "gpt2" not in found.types
    recorded = results(llama={"built": OK, "onnx": OK}, gpt2={"built": OK})
    found = results(llama={"built": OK})
    assert regressions(found, recorded, ["llama", "gpt2"]) == ["llama, onnx: was not run", "gpt2, built: was not run"]
    assert regressions(found, recorded, ["llama"], ["built"]) == []  # the other column was not chosen
    # what did not pass before may fail, or not be tried
    recorded = results(llama={"built": OK, "onnx": FAILED, "picture": NOT_TRIED})
    for result in (FAILED, NOT_TRIED):
        assert regressions(results(llama={"built": OK, "onnx": result, "picture": result}), recorded, ["llama"]) == []


def test_types_that_are_absent_are_worse_if_they_were_chosen_and_are_there(results):
    gone = {"image:gone_model": {"built": OK}}
    recorded = results(llama={"built": OK}, gpt2={"built": OK}, opt={"built": FAILED}, **gone)
    verdict = judge(results(llama={"built": OK}), recorded, ["llama"], whole.parse(["--columns", "built"]))
    assert verdict.worse == ["gpt2: the type is there, and was not run"]
    assert verdict.notes == ["image:gone_model: the installed transformers has no such type"]
    recorded = results(llama={"built": OK}, **{"seq2seq:t5": {"built": OK}})
    found = results(llama={"built": OK})
    few, every = cut.parse(["--columns", "built"]), cut.parse(["--columns", "built", "--all"])
    assert judge(found, recorded, ["llama"], few).worse == []
    assert judge(found, recorded, ["llama"], every).worse == ["seq2seq:t5: the type is there, and was not run"]


def test_only_the_chosen_types_are_compared(results):
    recorded = results(llama={"built": OK}, gpt2={"built": OK}, **{"image:llava": {"built": OK}})
    chosen = {"": ["gpt2", "image:llava"], "--only llama": [], "--only image:,llama": ["image:llava"], "--sample 1": []}
    for typed, worse in chosen.items():
        options = whole.parse([*typed.split(), "--columns", "built"])
        verdict = judge(results(llama={"built": OK}), recorded, ["llama"], options)
        assert [line.rpartition(": ")[0] for line in verdict.worse] == worse


def test_a_runtime_that_is_not_installed_is_worse_unless_its_columns_are_left_out(results, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "executorch" else name)
    recorded = results(llama={"program": OK, "OpenVINO": OK, "ExecuTorch": OK})
    found = results(llama={"program": OK, "OpenVINO": OK, "AOTInductor": OK})
    verdict = judge(found, recorded, ["llama"], runtimes.parse([]))
    assert verdict.worse == [
        "ExecuTorch: 1 types passed, and none was run: executorch is not installed; --columns leaves it out"
    ]
    assert judge(found, recorded, ["llama"], runtimes.parse(["--columns", "OpenVINO"])).worse == []


def test_a_comparison_with_nothing_and_a_run_that_tried_nothing_are_worse(results):
    options = whole.parse(["--only", "llama", "--columns", "built"])
    found = results(llama={"built": OK})
    said = ["none of the 1 types of this run passed there: nothing was compared"]
    assert judge(found, results(gpt2={"built": OK}), ["llama"], options).worse == said
    assert judge(found, results(llama={"built": FAILED}), ["llama"], options).worse == said
    options = whole.parse(["--columns", "built"])
    assert judge(results(llama={"built": NOT_TRIED}), None, ["llama"], options).worse == [
        "nothing was tried, of 1 types: NoCacheError: takes no cache"
    ]
    assert judge(results(), None, [], options).worse == ["nothing was tried, of 0 types: no column was run"]
    assert judge(results(llama={"built": FAILED}), None, ["llama"], options).worse == []


@pytest.mark.slow
@pytest.mark.parametrize(("recorded", "code"), [(OK, 0), (FAILED, 0), (None, 1)])
def test_the_exit_code_of_a_run_states_whether_it_is_as_good(recorded, code, tmp_path, capsys):
    against = tmp_path / "before.json"
    columns = {"built": OK, "prefill": recorded if recorded is FAILED else OK}
    if recorded is OK:
        del columns["prefill"]
    held = {"versions": {}, "way": "", "types": {"fails": {"columns": columns}}}
    against.write_text(json.dumps(held), encoding="utf-8")
    options = whole.parse(["--only", "fails", "--columns", "built,prefill", "--against", str(against)])
    runner = Runner("yobx_flatten", Limits(seconds=60.0, gigabytes=64.0), run_fake, load_fake, preload=())
    made = Results(tmp_path / "now.json", {}, "yobx_flatten")
    console = command.Console(highlight=False, soft_wrap=True)
    assert command.run_work(runner, ["fails"], made, options, "state", console) == code
    assert ("worse than in before.json: fails, prefill: ValueError: wrong" in capsys.readouterr().out) == bool(code)
