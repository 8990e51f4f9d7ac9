"""Errors of any class: what is undone, the line that installs a library, and the version that may be the cause."""

import importlib.metadata
import json
import pickle
import re
import shlex
import types
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import yobx_flatten
from tests.modules import module_class
from yobx_flatten import MissingDependencyError, errors, explain_error, export_program
from yobx_flatten.__main__ import main
from yobx_flatten.core.terminal.command_line import UserError, explain_failure
from yobx_flatten.errors import (
    NEWEST_TRIED,
    VersionDependentError,
    naming_untried_versions,
    possible_cause,
    untried_versions,
    without_cause,
)
from yobx_flatten.errors.failures import noted_on_failure, raised_as, result_or, undone_on_failure


def raising(error):
    def run():
        raise error

    return run


def test_an_error_of_any_class_has_a_result_and_the_end_of_a_process_has_none():
    assert result_or(raising(ArithmeticError("why")), lambda error: f"raised {error}") == "raised why"
    assert result_or(lambda: "returned", lambda error: "raised") == "returned"
    for ending in (KeyboardInterrupt, SystemExit):
        with pytest.raises(ending):
            result_or(raising(ending()), lambda error: None)
        with pytest.raises(ending), raised_as(lambda error: ValueError("ours")):
            raising(ending())()


# tokenizers and safetensors raise the second one, which is no `Exception`, for files that are damaged
PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("cause", [KeyError("theirs"), PANIC("theirs")])
def test_an_error_of_ours_has_the_other_one_as_its_cause(cause):
    """One of a named class, and one that has no better words, comes out as it is."""
    for known in ((lambda error: ValueError("ours"), type(cause)), (lambda error: None,)):
        with pytest.raises(type(cause)) as found, raised_as(*known):
            raising(cause)()
        assert found.value is cause
        assert cause.__cause__ is None
    with (
        pytest.raises(ValueError, match=r"ours: .*theirs") as found,
        raised_as(lambda error: ValueError(f"ours: {error}")),
    ):
        raising(cause)()
    assert found.value.__cause__ is cause


def test_a_note_is_added_to_the_error_itself():
    theirs, ending = KeyError("theirs"), KeyboardInterrupt()
    with pytest.raises(KeyError) as found, noted_on_failure(lambda error: f"of {type(error).__name__}"):
        raising(theirs)()
    assert found.value is theirs
    assert theirs.__notes__ == ["of KeyError"]
    with pytest.raises(KeyboardInterrupt), noted_on_failure(lambda error: "a note"):
        raising(ending)()
    assert not hasattr(ending, "__notes__")


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_is_undone_once(ending):
    undone = []
    with undone_on_failure(lambda: undone.append(0)):
        pass
    with pytest.raises(ending), undone_on_failure(lambda: undone.append(1)):
        raising(ending())()
    assert undone == [1]


def installed(monkeypatch, folder, came):
    monkeypatch.setattr(errors, "__file__", str(folder / "site-packages" / "yobx_flatten" / "errors" / "d.py"))

    def distribution(name):
        if came == "without metadata":
            raise importlib.metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(read_text=lambda name: came and json.dumps({"url": came, "dir_info": {}}))

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def source_of(extra):
    with pytest.raises(MissingDependencyError) as refused:
        errors.require("no_such_library", purpose="a file", extra=extra)
    *words, source = shlex.split(str(refused.value).splitlines()[-1])
    assert words[:2] == ["pip", "install"]
    found = re.fullmatch(rf"(.*)\[{extra}\]", source)
    return words[2:], found[1]


@pytest.mark.parametrize("name", ["a checkout", "yobx_flatten-0.1.0-py3-none-any.whl"])
def test_it_names_the_checkout_or_the_wheel(name, tmp_path, monkeypatch):
    """pip notes it in direct_url.json; spaces are escaped there."""
    (tmp_path / name).mkdir()
    installed(monkeypatch, tmp_path, (tmp_path / name).as_uri())
    assert source_of("onnx,openvino") == ([], str(tmp_path / name))


@pytest.mark.parametrize("came", [None, "without metadata", "file:///no/such/folder", "https://example.org/a.whl"])
def test_it_names_the_package_where_no_folder_is_known(came, tmp_path, monkeypatch):
    installed(monkeypatch, tmp_path, came)
    assert source_of("openvino") == ([], "yobx-flatten")


def test_a_package_that_is_read_from_its_checkout_stays_so(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "pyproject.toml").touch()
    installed(monkeypatch, tmp_path, None)
    assert source_of("lora") == (["-e"], str(tmp_path / "site-packages"))


ROOT = Path(__file__).parents[3]
LINE = "transformers 99.1.0 is newer than the newest tried (5.24.0): it may be the cause"


@pytest.fixture
def install(monkeypatch):
    """Let libraries be installed in other versions; the three are as tried, unless a test states otherwise."""
    real = importlib.metadata.version

    def installed(**versions):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: {**NEWEST_TRIED, **versions}.get(name) or real(name)
        )

    monkeypatch.setitem(NEWEST_TRIED, "transformers", "5.24.0")
    installed()
    return installed


@pytest.fixture
def newer(install):
    install(transformers="99.1.0")


def test_the_newest_tried_versions_are_those_of_development_or_of_make_newest():
    """The newer of `constraints.txt` and of a run of `make newest` in which all steps passed."""
    held = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    path = ROOT / "docs" / "data" / "newest.json"
    ran = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"ok": False, "versions": {}}
    ran = {name: Version(version).public for name, version in ran["versions"].items()} if ran["ok"] else {}
    assert {name: max(held[name], ran.get(name, held[name]), key=Version) for name in NEWEST_TRIED} == NEWEST_TRIED


@pytest.mark.parametrize(
    ("version", "found"),
    [("5.24.0", []), ("5.24.0+cpu", []), ("4.56.2", []), ("5.24.1", ["5.24.1"]), ("5.25.0.dev0", ["5.25.0.dev0"])],
)
def test_a_version_is_untried_if_it_is_newer_than_all_that_were_tried(install, version, found):
    install(transformers=version)
    assert [one.installed for one in untried_versions()] == found


def test_a_library_that_is_missing_is_not_untried(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert untried_versions() == []
    assert possible_cause() == ""


def test_several_libraries_are_named_in_one_line(install):
    install(transformers="99.1.0", onnxruntime="99.0.0")
    assert possible_cause() == (
        "transformers 99.1.0 is newer than the newest tried (5.24.0), and onnxruntime 99.0.0 is newer than the newest "
        f"tried ({NEWEST_TRIED['onnxruntime']}): they may be the cause"
    )


# What models, caches and programs turned out to be; all others are about arguments, files and this machine.
DEPENDENT = {
    *("CacheStructureError", "DynamicShapesError", "GenerationError", "ModelSourceError", "NotRegisteredError"),
    *("RecordError", "ReplayError", "RoundTripError", "SpecMismatchError", "StaticDataError", "UnsetFieldError"),
    "UnsupportedLayerError",
}


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_that_a_newer_version_may_cause_end_with_its_name(name, install):
    assert str(getattr(errors, name)("no such thing")) == "no such thing"
    install(transformers="99.1.0")
    error = getattr(errors, name)("no such thing")
    assert str(error) == (f"no such thing\n{LINE}" if name in DEPENDENT else "no such thing")
    assert without_cause(error) == "no such thing"


def test_the_report_of_a_failed_proof_has_the_line_at_its_end_only(newer):

    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x + type(self).calls

    with pytest.raises(errors.ReplayError) as caught:
        export_program(Counts(), (torch.ones(2),))
    assert str(caught.value).count(LINE) == 1
    assert str(caught.value).endswith(f"\n{LINE}")


def test_an_error_of_the_other_package_has_it_also_after_it_was_sent(newer):
    from roundpipe_runtime.errors import BatchStructureError, CutError

    error = pickle.loads(pickle.dumps(CutError("layers", "none found")))
    assert (error.reason, error.args[-1], str(error)) == ("layers", "none found", f"none found\n{LINE}")
    assert issubclass(BatchStructureError, VersionDependentError)


LeavesTorch = module_class("LeavesTorch", lambda self, x: x * x.data_ptr())


def test_a_failed_export_has_the_line_as_a_note_once_and_an_unknown_error_is_explained_with_it(newer):
    with pytest.raises(Exception, match="Cannot access data pointer") as caught, naming_untried_versions():
        export_program(LeavesTorch(), (torch.ones(2),))
    assert caught.value.__notes__ == [LINE]
    with pytest.raises(errors.ReplayError) as caught, naming_untried_versions():
        raise errors.ReplayError("x")
    assert not hasattr(caught.value, "__notes__")
    assert str(explain_error(RuntimeError("no idea"))).splitlines()[1:] == [LINE]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (errors.GenerationError("it takes no cache:\n    export_onnx(model)"), "it takes no cache: export_onnx(model)"),
        (errors.ReplayError("it differs\n  ok  logits"), "it differs\n  ok  logits"),
        (TypeError("unexpected keyword"), "TypeError: unexpected keyword (--debug shows where)"),
    ],
)
def test_the_command_line_shows_it_on_a_line_of_its_own(error, shown, newer, capsys):
    explain_failure(error, debug=False)
    assert capsys.readouterr().err == f"yobx-flatten: {shown}\n{LINE}\n"


@pytest.mark.parametrize("error", [UserError("no such model"), FileNotFoundError("x"), MemoryError()])
def test_the_command_line_names_no_version_for_what_was_typed_and_for_files(error, newer, capsys):
    explain_failure(error, debug=False)
    assert "newest tried" not in capsys.readouterr().err


def test_env_names_the_newest_tried_versions(install, capsys):
    assert main(["env"]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    for name, tried in NEWEST_TRIED.items():
        assert lines[name] == f"{tried} (newest tried: {tried})"
    is_installed = any(importlib.metadata.distributions(name="yobx-flatten"))  # and not a checkout on the path alone
    assert lines["yobx-flatten"] == (yobx_flatten.__version__ if is_installed else "not installed")
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["newest_tried"], found["newer_than_tried"]) == (NEWEST_TRIED, [])
    install(transformers="99.1.0")
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "transformers 99.1.0 is newer than the newest tried (5.24.0). If something fails: "
        "pip install 'transformers<=5.24.0'"
    )
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["newer_than_tried"] == ["transformers"]


def test_a_missing_library_is_not_installed_and_other_errors_have_no_cause():
    assert [errors.is_installed(name) for name in ("torch", "no_such_library")] == [True, False]
    assert without_cause(ValueError("no such thing")) == "no such thing"
