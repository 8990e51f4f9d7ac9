"""Files that a user or another file names are opened and written by `yobx_flatten.core.files`, with no way around it.

It refuses pipes and devices, and writes whole or not at all.
"""

import ast
import pathlib

import pytest

import roundpipe_runtime
import yobx_flatten

SYSTEM = "files of the system, whose names are in the source"
OWN = "files that this process has just written in a hidden folder"
# Files of both packages that open files by themselves, and why they may
READERS = {
    "yobx_flatten/errors/__init__.py": "what pip noted of the installed package",
    "yobx_flatten/core/files/document.py": "the way to a file; safetensors opens what `open_regular` has opened before",
    "yobx_flatten/core/files/limited.py": SYSTEM,
    "yobx_flatten/core/files/scratch.py": "the list in a hidden folder, which is read under its lock",
    "yobx_flatten/export/onnx/compare_nodes.py": "onnx_ir opens what `read_onnx` has read before",
    "yobx_flatten/export/onnx/quantized.py": OWN,
    "yobx_flatten/export/onnx/rounding.py": OWN,
    "yobx_flatten/export/model_facts.py": SYSTEM,
    "yobx_flatten/export/proof/replay.py": OWN,
    "yobx_flatten/huggingface/tracing/support.py": "sources of the installed transformers",
    "yobx_flatten/model_folder/client_layout.py": OWN,
    "yobx_flatten/runners/onnx_session.py": SYSTEM,
    "yobx_flatten/runners/program_runner.py": "a program, which only a caller that trusts it may load",
    "yobx_flatten/core/terminal/command_line.py": SYSTEM,
    "roundpipe_runtime/device/disk.py": SYSTEM,
    "roundpipe_runtime/distributed/ranks/alarm.py": SYSTEM,
    "roundpipe_runtime/estimate/hardware.py": SYSTEM,
    "roundpipe_runtime/huggingface/trainer/pipeline_trainer.py": "files of a Trainer, which are pickles",
}
HIDDEN = "it is given a place in a hidden folder, which its caller publishes"
# Files of both packages that write, rename or save by themselves, and why they may
WRITERS = {
    "yobx_flatten/core/files/scratch.py": "the way to the disk",
    "yobx_flatten/core/files/document.py": HIDDEN,
    "yobx_flatten/export/onnx/file.py": HIDDEN,
    "yobx_flatten/export/onnx/rounding.py": "a temporary file that is read at once",
    "yobx_flatten/export/onnx/weights.py": HIDDEN,
    "yobx_flatten/export/runtimes/executorch.py": HIDDEN,
    "yobx_flatten/model_folder/write.py": HIDDEN,
    "yobx_flatten/model_folder/client_layout.py": HIDDEN,
    "yobx_flatten/model_folder/source/configuration.py": HIDDEN,
    "yobx_flatten/model_folder/manifest.py": HIDDEN,
    "yobx_flatten/storage/nested.py": HIDDEN,
    "roundpipe_runtime/checkpoint/folder.py": "checkpoints, which several processes write together",
    "roundpipe_runtime/checkpoint/tensor_files.py": HIDDEN,
    "roundpipe_runtime/checkpoint/training_state.py": HIDDEN,
    "roundpipe_runtime/cli/app.py": "nothing is kept: os.devnull",
    "roundpipe_runtime/fine_tune/records.py": f"lines are added to a file that was written whole; {HIDDEN}",
    "roundpipe_runtime/fine_tune/trainer.py": HIDDEN,
    "roundpipe_runtime/huggingface/trainer/pipeline_trainer.py": "a complete, hidden checkpoint gets its name",
    "yobx_flatten/export/exported_model.py": "a program of another library, which is opened in a hidden folder",
}
LOADERS = {"torch", "torch.export", "onnx", "ir", "onnx_ir", "numpy", "np", "json"}
SAVERS = {"torch", "torch.export", "onnx", "ir", "onnx_ir", "numpy", "np"}
READING = {"read_text", "read_bytes"}
WRITING = {"write_text", "write_bytes", "savefig", "print_figure", "rename"}


def reads(name, owner, call):
    modes = modes_of(call)
    if name == "open" and not any(mode & set("wax") for mode in modes):
        # a method of another object takes no mode
        is_file = owner in ("", "os", "io") or any(mode <= set("rbt") for mode in modes)
        return is_file or any(keyword.arg == "encoding" for keyword in call.keywords)
    return (
        (name == "load" and owner in LOADERS) or name in ("safe_open", "load_file") or bool(name in READING and owner)
    )


def writes(name, owner, call):
    if name == "open":
        return any(mode & set("wax+") for mode in modes_of(call))
    if name in ("replace", "save"):
        return owner in ({"os"} if name == "replace" else SAVERS)
    return name == "save_file" or bool(name in WRITING and owner)  # `write_text` alone is that of scratch


def modes_of(call):
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [set(text) for text in texts if set(text) <= set("rwaxbt+")]


def finds(rule, source):
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call):
            function = call.func
            if isinstance(function, ast.Name) and rule(function.id, "", call):
                return True
            if isinstance(function, ast.Attribute) and rule(function.attr, ast.unparse(function.value), call):
                return True
    return False


@pytest.mark.parametrize(("rule", "allowed"), [(reads, READERS), (writes, WRITERS)], ids=["reads", "writes"])
@pytest.mark.parametrize("package", [yobx_flatten, roundpipe_runtime], ids=lambda package: package.__name__)
def test_no_code_goes_around_it(package, rule, allowed):
    """A new reader or writer uses `yobx_flatten.core.files`, or states here why it need not."""
    root = pathlib.Path(package.__file__).parent
    paths = sorted(root.rglob("*.py"))
    found = {
        path.relative_to(root.parent).as_posix() for path in paths if finds(rule, path.read_text(encoding="utf-8"))
    }
    assert found == {name for name in allowed if name.startswith(f"{package.__name__}/")}


FOUND = {
    reads: [
        "open(path)", "with path.open(encoding='utf-8') as file: pass", "os.open(path, os.O_RDONLY)", "load_file(path)",
        "path.read_text(encoding='utf-8')", "onnx.load(str(path), load_external_data=False)",
    ],
    writes: [
        "path.write_text('x')", "with path.open(mode='ab') as file: pass", "save_file(tensors, path)",
        "os.replace(one, other)", "torch.save(state, path)",
    ],
}  # fmt: skip
OTHERS = {
    reads: [
        "open(path, 'w')", "self._line.open()", "open_regular(path, failure=DamagedFileError)", "json.loads(text)",
    ],
    writes: ["open(path, 'rb')", "text.replace('a', 'b')", "write_text(path, 'x')"],
}  # fmt: skip


def test_the_rules_see_what_reads_and_what_writes():
    assert [source for rule, sources in FOUND.items() for source in sources if not finds(rule, source)] == []
    assert [source for rule, sources in OTHERS.items() for source in sources if finds(rule, source)] == []
