"""A file that a user or another file names is opened by `yobx_flatten.files`, which refuses pipes and devices."""

import ast
import pathlib

import pytest

import roundpipe_runtime
import yobx_flatten

SYSTEM = "files of the system, whose names are in the source"
OWN = "files that this process has just written in a hidden folder"
# Files of both packages that open files by themselves, and why they may
ALLOWED = {
    "yobx_flatten/files/document.py": "the way to a file",
    "yobx_flatten/files/flush.py": OWN,
    "yobx_flatten/files/limited.py": SYSTEM,
    "yobx_flatten/files/scratch.py": "the list in a hidden folder, which is read under its lock",
    "yobx_flatten/files/tensors.py": "safetensors opens what `open_regular` has opened before",
    "yobx_flatten/export/onnx/compare_nodes.py": "onnx_ir opens what `read_onnx` has read before",
    "yobx_flatten/export/onnx/quantized.py": OWN,
    "yobx_flatten/export/onnx/rounding/input_moments.py": OWN,
    "yobx_flatten/export/proof/memory.py": SYSTEM,
    "yobx_flatten/export/proof/replay.py": OWN,
    "yobx_flatten/huggingface/tracing/support.py": "sources of the installed transformers",
    "yobx_flatten/model_folder/client_layout.py": OWN,
    "yobx_flatten/runners/onnx_session.py": SYSTEM,
    "yobx_flatten/runners/program_runner.py": "a program, which only a caller that trusts it may load",
    "yobx_flatten/terminal/running.py": SYSTEM,
    "roundpipe_runtime/device/disk.py": SYSTEM,
    "roundpipe_runtime/distributed/ranks/machine.py": SYSTEM,
    "roundpipe_runtime/distributed/weights/shared_store.py": SYSTEM,
    "roundpipe_runtime/estimate/hardware.py": SYSTEM,
    "roundpipe_runtime/huggingface/trainer/saving_trainer.py": "files of a Trainer, which are pickles",
    "roundpipe_runtime/timeline/drawing.py": "a page of this package",
}
LOADERS = {"torch", "torch.export", "onnx", "ir", "onnx_ir", "numpy", "np", "json"}


def is_reader(call):
    """Whether a call opens a file to read it."""
    function = call.func
    if isinstance(function, ast.Name):
        name, owner = function.id, ""
    elif isinstance(function, ast.Attribute):
        name, owner = function.attr, ast.unparse(function.value)
    else:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name == "open" and not any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax") for mode in modes):
        # a method of another object takes no mode
        return (
            owner in ("", "os", "io")
            or any(set(mode) <= set("rbt") for mode in modes)
            or "encoding" in str([keyword.arg for keyword in call.keywords])
        )
    if name == "load":
        return owner in LOADERS
    return name in ("safe_open", "load_file") or (name in ("read_text", "read_bytes") and bool(owner))


def reads(source):
    return any(is_reader(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("package", [yobx_flatten, roundpipe_runtime], ids=lambda package: package.__name__)
def test_no_code_reads_around_it(package):
    """A new reader uses `open_regular` and what stands on it, or states here why it need not."""
    root = pathlib.Path(package.__file__).parent
    paths = sorted(root.rglob("*.py"))
    found = {path.relative_to(root.parent).as_posix() for path in paths if reads(path.read_text(encoding="utf-8"))}
    assert found == {name for name in ALLOWED if name.startswith(f"{package.__name__}/")}


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'rb')", True),
        ("open(path, encoding='utf-8')", True),
        ("path.open('rb')", True),
        ("with path.open(encoding='utf-8') as file: pass", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("path.read_text(encoding='utf-8')", True),
        ("json.load(file)", True),
        ("onnx.load(str(path), load_external_data=False)", True),
        ("load_file(path)", True),
        ("safe_open(path, framework='pt')", True),
        ("open(path, 'w')", False),
        ("path.open('ab')", False),
        ("self._line.open()", False),
        ("open_regular(path, failure=DamagedFileError)", False),
        ("read_text(path, failure=DamagedFileError)", False),
        ("json.loads(text)", False),
    ],
)
def test_the_rule_sees_what_reads(source, is_found):
    assert reads(source) == is_found
