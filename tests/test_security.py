"""Each row of the table in SECURITY.md, executed: what may come from strangers runs nothing, other files need trust."""

import ast
import contextlib
import hashlib
import json
import os
import pathlib
import re
import zipfile
import zlib

import onnx
import pytest
import torch

from roundpipe_runtime import DamagedCheckpointError, load_checkpoint, save_checkpoint
from tests.fuzz.doors import DOORS
from tests.runtime import tiny_training as tiny
from yobx_flatten import ProgramGenerator, export_program, load_nested, open_generator, verify_folder
from yobx_flatten.__main__ import main
from yobx_flatten.errors import DamagedFileError, FlattenError, UntrustedFileError
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.program_runner import open_program

TEXT = (pathlib.Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip(): cells[2].strip()
    for cells in (line.strip("|").split("|") for line in TEXT.splitlines() if re.match(r"\| [^f-]", line))
}
"""File to answer."""

ATTACK = {
    "!dataclass": [
        "torch.export.graph_signature:InputSpec",
        {"_URLopener__tempfiles": ["marker"], "__class__": {"!class": "urllib.request:URLopener"}},
    ]
}


class Payload:
    def __reduce__(self):
        return os.mkdir, ("marker",)


@pytest.fixture(autouse=True)
def _no_code_runs(tmp_path, monkeypatch):
    """Whatever a test reads here, no file appears."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "marker").exists()


def good(name, folder):
    folder.mkdir()
    DOORS[name].write(folder)
    DOORS[name].read(folder)
    return folder


def with_pickle(program, target):
    """A program whose example inputs are a pickle of a stranger."""
    torch.save(Payload(), "payload")
    pickle = pathlib.Path("payload").read_bytes()
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle if "sample_inputs" in name or "example_inputs" in name else old.read(name))
    return target


def stored_program(folder):
    folder.mkdir()
    export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), cases=[], proof="none").save(folder / "model.pt2")
    return folder / "model.pt2"


def nested_inputs(folder):
    path = good("nested", folder) / "values.onnx"
    model = onnx.load(path)
    found = {entry.key: entry for entry in model.metadata_props}
    structure = {"node": "builtins:dict", "static": ["a"], "children": [{"leaf": "static", "value": ATTACK}]}
    found["yobx_flatten.structure"].value = json.dumps(structure)
    found["yobx_flatten.structure_crc32"].value = str(zlib.crc32(json.dumps(structure).encode()))
    onnx.save(model, path)
    with pytest.raises(FlattenError):
        load_nested(path)


def recorded_calls(folder):
    path = sorted((good("calls", folder) / "calls").iterdir())[0]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    call = json.loads(header["__metadata__"]["yobx_flatten.call"])
    call["about"]["names"] = {"!class": "tests.fuzz.stranger:x"}
    header["__metadata__"]["yobx_flatten.call"] = json.dumps(call)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(FlattenError, match=r"tests\.fuzz\.stranger"):
        DOORS["calls"].read(folder)


def restate(folder, **entries):
    manifest = folder / "yobx_flatten.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | entries))


def onnx_folder(folder):
    """The manifest chooses neither a loader that runs pickles nor a file elsewhere."""
    model = good("folder", folder) / "model"
    restate(model, cases={"model.onnx": ["/etc/passwd"]})
    with pytest.raises(DamagedFileError, match="not in the folder"):
        verify_folder(model)
    with_pickle(stored_program(folder.with_name("p")), model / "model.pt2")
    restate(model, runtime="torch", files=["model.pt2"], cases={})
    with pytest.raises(UntrustedFileError):
        open_generator(model)


def executorch_folder(folder):
    """Digests find damage before the library reads a byte; the rest is up to that library."""
    model = good("folder", folder) / "model"
    (model / "model.pte").write_bytes(b"one")
    digest = hashlib.sha256(b"another").hexdigest()
    restate(model, runtime="executorch", format="executorch", files=["model.pte"], sha256={"model.pte": digest})
    with pytest.raises(DamagedFileError, match=r"model\.pte"):
        verify_folder(model)


def aotinductor_package(folder):
    """A shared library, which is loaded where it is trusted."""
    folder.mkdir()
    exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), cases=[])
    exported.to_aotinductor(folder / "model.pt2")
    with pytest.raises(UntrustedFileError, match="trust=True"):
        open_runner(folder / "model.pt2", runtime="aotinductor")
    assert open_runner(folder / "model.pt2", runtime="aotinductor", trust=True).outputs == ["output"]


def exported_program(folder):
    """The pickle runs where it is trusted, and in torch's own function, as the table states; no door opens it else."""
    program = with_pickle(stored_program(folder), folder / "changed.pt2")
    for door in (open_program, open_runner, ProgramGenerator):
        with pytest.raises(UntrustedFileError, match="trust=True"):
            door(program)
    assert main(["explain", str(program)]) == 2
    assert not pathlib.Path("marker").exists()
    for read in (torch.export.load, lambda path: open_program(path, trust=True)):
        with contextlib.suppress(Exception):  # what the pickle leaves is not an example
            read(program)
        pathlib.Path("marker").rmdir()  # it is there


def checkpoint(folder):
    """What torch would unpickle, and what JSON could name, are damage."""
    place = pathlib.Path(save_checkpoint(folder, torch.nn.Linear(2, 1), data={"step": 1}).path)
    assert load_checkpoint(folder, torch.nn.Linear(2, 1)) == {"step": 1}
    torch.save(Payload(), "payload")
    training = json.loads((place / "training.json").read_text())
    wrong = {
        "model.safetensors": pathlib.Path("payload").read_bytes(),
        "training.json": json.dumps(training | {"data": {"$dtype": "load"}}).encode(),
    }
    for name, content in wrong.items():
        before = (place / name).read_bytes()
        (place / name).write_bytes(content)
        DOORS["checkpoint"].repair(folder)
        with pytest.raises(DamagedCheckpointError):
            load_checkpoint(folder, torch.nn.Linear(2, 1))
        (place / name).write_bytes(before)


def trainer_folder(folder):
    """It holds pickles, which transformers reads."""
    from roundpipe_runtime.fine_tune import Settings, Training

    settings = Settings(batch=2, steps=1, devices="virtual:1", check=False)
    with Training(tiny.source().load(), tiny.blocks(rows=4), settings) as training:
        training.train()
        saved = pathlib.Path(training.save(folder))
    assert {"optimizer.pt", "training_args.bin"} <= {path.name for path in saved.iterdir()}
    with zipfile.ZipFile(saved / "training_args.bin") as archive:
        assert any(name.endswith("data.pkl") for name in archive.namelist())


def model_folder(folder):
    """Code beside the weights is left alone, also where the configuration asks for it."""
    folder = tiny.weights_folder(folder)
    (folder / "modeling_own.py").write_text("import os\nos.mkdir('marker')\n")
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": own}))
    find_model(str(folder)).load()
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": own, "model_type": "own"}))
    with pytest.raises(FlattenError):
        find_model(str(folder)).load()


TESTS = {
    "nested inputs, stored cases (`.onnx`)": (nested_inputs, "yes"),
    "recorded calls": (recorded_calls, "yes"),
    "an exported folder of ONNX files": (onnx_folder, "yes, if you trust onnxruntime or OpenVINO"),
    "an ExecuTorch folder": (executorch_folder, "yes, if you trust ExecuTorch"),
    "an AOTInductor package (`.pt2`)": (aotinductor_package, "**no**"),
    "an exported program (`.pt2`)": (exported_program, "**no**"),
    "a training checkpoint": (checkpoint, "yes"),
    "a checkpoint folder of a Trainer": (trainer_folder, "**no**"),
    "a Hugging Face model folder": (model_folder, "yes, with safetensors"),
}


def test_every_row_is_executed():
    assert list(ROWS) == list(TESTS)


@pytest.mark.slow
@pytest.mark.parametrize("file", TESTS)
def test_a_row_is_as_it_says(tmp_path, file):
    run, answer = TESTS[file]
    assert ROWS[file].startswith(answer)
    run(tmp_path / "folder")


# whose `from_pretrained` reads no Python: settings of generate, files of PEFT, weights of a class that is at hand
READS_NO_CODE = ("GenerationConfig", "type(", "peft.")


@pytest.mark.parametrize("package", ["yobx_flatten", "roundpipe_runtime"])
def test_each_from_pretrained_states_whether_code_may_run(package):
    """Without an answer, transformers asks on the terminal; `FILES_ONLY` and what is made of it contain one."""
    unclear = []
    for path in sorted((pathlib.Path(__file__).parents[1] / package).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained"):
                continue
            owner = ast.unparse(call.func.value)
            answers = [ast.unparse(one.value) for one in call.keywords if one.arg in (None, "trust_remote_code")]
            # `options` come from callers, which pass FILES_ONLY; `where` is of this package's own classes
            known = {"FILES_ONLY", "given", "options", "where"} & set(re.findall(r"\w+", " ".join(answers)))
            if not known and not owner.startswith(READS_NO_CODE):
                unclear.append(f"{path.name}:{call.lineno} {owner}.from_pretrained")
    assert unclear == []
