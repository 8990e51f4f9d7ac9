"""The action of GitHub: its steps, read from the file, run in a fresh environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from .peer_files import WRITTEN, llama

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
ACTION = ROOT / ".github" / "actions" / "verify" / "action.yml"


def run_action(environment, workspace, **inputs):
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    assert set(inputs) <= set(action["inputs"])
    given = {name: inputs.get(name, of.get("default", "")) for name, of in action["inputs"].items()}
    assert all(given[name] for name, of in action["inputs"].items() if of.get("required"))
    output = ""
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        named = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
            for name, text in step.get("env", {}).items()
        }
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        here = {"GITHUB_ACTION_PATH": str(ACTION.parent), "PATH": path}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],  # as GitHub runs a step
            env={**outside, **here, **named},
            cwd=workspace,
            capture_output=True,
            text=True,
            check=False,
        )
        output += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, output
    return 0, output


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return place


@pytest.mark.slow
def test_the_action_passes_a_right_file_and_fails_on_a_wrong_one(environment, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(WRITTEN / "torch", tmp_path / "exported")
    assert sys.prefix != str(environment)
    status, output = run_action(environment, tmp_path, path="exported/model.onnx", model="model")
    assert status == 0, output
    assert "right" in output
    model.lm_head.weight.data[5] += 0.2
    model.save_pretrained(tmp_path / "other")
    status, output = run_action(environment, tmp_path, path="exported", model="other")
    assert status == 1, output
    assert "WRONG" in output
    status, output = run_action(
        environment, tmp_path, path="exported", model="model", map="input_ids=input_ids words=ids"
    )
    assert status == 2, output
    assert "no file has an input or output words" in output
    status, output = run_action(environment, tmp_path, path="exported; touch owned", model="model")
    assert status == 2
    assert not (tmp_path / "owned").exists(), "an input is no part of the program"
