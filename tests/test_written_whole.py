"""A file that a user names is written by `yobx_flatten.files.scratch`: whole or not at all, with no way around it."""

import ast
import pathlib

import pytest

import roundpipe_runtime
import yobx_flatten

HIDDEN = "it is given a place in a hidden folder, which its caller publishes"
# Files of both packages that write, rename or save by themselves, and why they may
ALLOWED = {
    "yobx_flatten/files/scratch.py": "the way to the disk",
    "yobx_flatten/files/tensors.py": HIDDEN,
    "yobx_flatten/export/onnx/file.py": HIDDEN,
    "yobx_flatten/export/onnx/rounding/input_moments.py": "a temporary file that is read at once",
    "yobx_flatten/export/onnx/weights.py": HIDDEN,
    "yobx_flatten/export/runtimes/executorch.py": HIDDEN,
    "yobx_flatten/model_folder/write.py": HIDDEN,
    "yobx_flatten/model_folder/client_layout.py": HIDDEN,
    "yobx_flatten/model_folder/genai_files.py": HIDDEN,
    "yobx_flatten/model_folder/manifest.py": HIDDEN,
    "yobx_flatten/model_folder/sidecar_files.py": HIDDEN,
    "yobx_flatten/storage/onnx_write.py": HIDDEN,
    "roundpipe_runtime/checkpoint/folder.py": "checkpoints, which several processes write together",
    "roundpipe_runtime/checkpoint/manifest.py": HIDDEN,
    "roundpipe_runtime/checkpoint/tensor_files.py": HIDDEN,
    "roundpipe_runtime/checkpoint/training_state.py": HIDDEN,
    "roundpipe_runtime/cli/app.py": "nothing is kept: os.devnull",
    "roundpipe_runtime/fine_tune/model_card.py": "the picture is a file of `whole_file`",
    "roundpipe_runtime/fine_tune/records.py": "lines are added to a file that was written whole",
    "roundpipe_runtime/fine_tune/saved_model.py": HIDDEN,
    "roundpipe_runtime/fine_tune/trainer.py": HIDDEN,
    "roundpipe_runtime/huggingface/trainer/checkpoints.py": "a checkpoint that is complete gets its name",
    "roundpipe_runtime/huggingface/trainer/saving_trainer.py": HIDDEN,
    "roundpipe_runtime/timeline/drawing.py": "the picture is a file of `whole_file`",
}
METHODS = {"write_text", "write_bytes", "save_file", "savefig", "print_figure", "rename"}


def is_writer(call):
    """Whether a call writes a file, or gives one its name."""
    function = call.func
    if isinstance(function, ast.Name):
        name, owner = function.id, ""
    elif isinstance(function, ast.Attribute):
        name, owner = function.attr, ast.unparse(function.value)
    else:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name == "open":
        return any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)
    if name == "replace":
        return owner == "os"
    if name == "save":
        return owner in ("torch", "torch.export", "onnx", "ir", "onnx_ir", "numpy", "np")
    return name in METHODS and bool(owner or name == "save_file")  # `write_text` alone is that of scratch


def writes(source):
    return any(is_writer(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("package", [yobx_flatten, roundpipe_runtime], ids=lambda package: package.__name__)
def test_no_code_writes_around_it(package):
    """A new writer uses `whole_file`, `write_text` or `scratch_for`, or states here why it need not."""
    root = pathlib.Path(package.__file__).parent
    paths = sorted(root.rglob("*.py"))
    found = {path.relative_to(root.parent).as_posix() for path in paths if writes(path.read_text(encoding="utf-8"))}
    # of the program of another library, which is opened in a hidden folder
    found.discard("yobx_flatten/export/exported_model.py")
    assert found == {name for name in ALLOWED if name.startswith(f"{package.__name__}/")}


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.write_text('x')", True),
        ("open(path, 'w')", True),
        ("with path.open(mode='ab') as file: pass", True),
        ("save_file(tensors, path)", True),
        ("figure.savefig(path)", True),
        ("os.replace(one, other)", True),
        ("torch.save(state, path)", True),
        ("open(path, 'rb')", False),
        ("open(path, encoding='utf-8')", False),
        ("text.replace('a', 'b')", False),
        ("write_text(path, 'x')", False),
    ],
)
def test_the_rule_sees_what_writes(source, is_found):
    assert writes(source) == is_found
