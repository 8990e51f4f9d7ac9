"""Tasks of users, done by typing what a page of the site states, in an empty folder; another source checks the outcome.

`make tasks` types what is on the built site, with the wheel installed. `make test` does the quick ones, from the
sources of the pages.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests import fresh_process
from tests.tasks.pages import blocks_of, in_sections, program_of, shell_lines
from tests.test_docs_guide import NAMED

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("TASKS_SITE")  # the folder of the built site

pytestmark = [pytest.mark.slow]


class Task(NamedTuple):
    page: str  # of the guide
    sections: tuple[str, ...] = ()  # headings; empty for the whole page
    needs: tuple[str, ...] = ()  # libraries that the page tells to install
    is_quick: bool = False  # whether it takes less than five seconds


ONNX = ("onnxruntime", "onnxscript")
# by the file in checks/ that looks at the outcome
TASKS = {
    "checkpoint": Task("generate", ("From a checkpoint to tokens",), ONNX),
    "dataclass": Task("register_your_class", ("Export a module that takes a dataclass",), ONNX, True),
    "diagnosis": Task(
        "diagnose", ("See what torch sees", "Check the inputs of an export", "Understand an error"), is_quick=True
    ),
    "quantization": Task("quantize", (), ONNX),
    "embeddings": Task("generate", ("From a checkpoint to tokens", "Embeddings"), ONNX),
    "failing_call": Task("record", ("", "Export what was recorded", "Reproduce a failing call")),
    "genai": Task("runtimes", ("onnxruntime-genai",), ("onnxruntime_genai", "onnxscript")),
    "sequential": Task("runtime", ("", "The training loop"), (), True),
    "static_cache": Task("caches", ("", "StaticCache")),
    "text": Task("command_line", ("roundpipe train",)),
    "trainer": Task("runtime_trainer", ("",)),
    "training": Task("runtime_huggingface", ("",), (), True),
    "lora": Task("lora", ("", "Save and load"), ("peft",), True),
    "timeline": Task("runtime_devices", ("Choose devices", "What ran where"), (), True),
}


def blocks(task: Task):
    guide = Path(SITE) / "guide" if SITE else ROOT / "docs" / "guide"
    return in_sections(blocks_of((guide / task.page).with_suffix(".html" if SITE else ".md")), task.sections)


def environment() -> dict[str, str]:
    """That of a user: commands of the installed package are on the path, and nothing of the repository is."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PATH": path} | ({} if SITE else {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", TASKS)
def test_task_is_done_by_what_the_page_states(name, tmp_path):
    """The program of the page runs in an empty folder; what it made is compared with what another source makes."""
    task = TASKS[name]
    if not (SITE or task.is_quick):
        pytest.skip("make tasks")
    for library in task.needs:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    check = Path(__file__).with_name("checks") / f"{name}.py"
    program = f"{program_of(blocks(task))}\nimport runpy\nrunpy.run_path({str(check)!r})\n"
    if not SITE:
        fresh_process.run("-c", program, cwd=tmp_path, env=environment(), imported=fresh_process.TRAINER)
        return
    (tmp_path / "typed.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "typed.py"], cwd=tmp_path, env=environment(), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_killed_run_is_resumed_by_the_same_line(tmp_path):
    """The line of the page, killed in the middle and typed again, ends with the numbers that one run ends with."""
    file, typed = blocks(Task("runtime_checkpoints", ("The training loop",)))[:2]
    (tmp_path / NAMED.match(file.text)[1]).write_text(file.text, encoding="utf-8")
    (line,) = shell_lines(typed)
    python, script, folder, steps = line.split()
    assert (python, script) == ("python", "train.py")

    def saved(name):
        return sorted(path for path in (tmp_path / name).glob("checkpoint-*") if path.is_dir())

    with started(tmp_path, folder, steps) as process:
        process.wait_for(lambda: len(saved(folder)) == 3 and int(saved(folder)[0].name.split("-")[1]) > 5)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with started(tmp_path, folder, steps) as process:
        assert process.wait() == 0, process.stderr
        first = int(re.match(rf"steps (\d+) to {steps}, loss ", process.stdout)[1])
    assert 5 < first < int(steps)
    with started(tmp_path, "one_run", steps) as process:
        assert process.wait() == 0, process.stderr

    found, wanted = (
        {**load_file(saved(run)[-1] / "model.safetensors"), **load_file(saved(run)[-1] / "training.safetensors")}
        for run in (folder, "one_run")
    )
    # the program draws nothing with NumPy, whose generator begins anywhere in each process
    assert [name for name in found if "numpy" not in name and not torch.equal(found[name], wanted[name])] == []
    assert found.keys() == wanted.keys()


@pytest.mark.skipif(not SITE, reason="make tasks")
def test_two_processes_of_torchrun_end_with_the_weights_of_one(tmp_path):
    """The page's script, started as it stands and by the line of the page."""
    file, *others = blocks(Task("runtime_distributed", ("The script",)))
    (line,) = (line for block in others for line in shell_lines(block))
    assert line == "torchrun --nproc-per-node=2 train.py"
    found = {}
    for typed in ("python train.py", line):
        folder = tmp_path / typed.split()[0]
        folder.mkdir()
        (folder / NAMED.match(file.text)[1]).write_text(file.text, encoding="utf-8")
        done = subprocess.run(typed, shell=True, cwd=folder, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        newest = sorted((folder / "run").glob("checkpoint-*"))[-1]
        weights = map(load_file, newest.glob("model*.safetensors"))
        found[typed] = {name: value for one in weights for name, value in one.items()}
    one, two = found.values()
    assert len(one) == 4
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def started(folder, *words):
    """`python train.py` with these words, as it is started by a user."""
    return fresh_process.start(*("-m", "train", *words), cwd=folder, env=environment(), imported=fresh_process.TRAINER)
