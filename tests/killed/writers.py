"""Write over what is there, in a process that ends at a chosen moment as by `kill -9`.

    python -m tests.killed.writers NAME FOLDER VALUE [EVENT]

writes what NAME writes with weights or values of VALUE. At the given event, which is a file that is opened for
writing, renamed or deleted in FOLDER, the process ends with status 9; without one it prints how many events there were.
"""

import functools
import os
import pathlib
import sys
from typing import Any

import onnx
import onnxruntime
import torch

import roundpipe_runtime as rp
import yobx_flatten as yf
from roundpipe_runtime.fine_tune import ByteTokenizer, model_source, save_model
from roundpipe_runtime.schedule.timeline import merge_timelines
from tests.runtime import tiny_training as tiny
from yobx_flatten.export.onnx import file as onnx_file

X = torch.ones(2, 64)


class _Scaled(torch.nn.Module):
    """Its output is the value; half of it is in the graph, and half in weights, which large files have beside them."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.linear = value, torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.constant_(self.linear.weight, 1 / 64)
        self.linear.weight.data *= value**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.value**0.5


def _run_onnx(path: pathlib.Path) -> float:
    (found,) = onnxruntime.InferenceSession(os.fspath(path)).run(None, {"x": X.numpy()})
    return float(found.mean())


def _filled(value: float) -> Any:
    model = tiny.source(num_hidden_layers=1).load(seed=1)
    torch.nn.init.constant_(model.model.norm.weight, value)
    return model.eval()


def _write_onnx(folder, value, **options):
    onnx_file.LARGE = 0  # weights beside every file
    yf.export_onnx(_Scaled(value).eval(), (X,), path=folder / "model.onnx", proof="none", **options)


def _write_nested(folder, value):
    yf.save_nested(folder / "values.onnx", {"x": torch.full((5000,), value), "value": value}, external_data=True)


def _read_nested(folder):
    found = yf.load_nested(folder / "values.onnx")
    (value,) = {*found["x"].tolist(), found["value"]}
    return float(value)


def _write_folder(folder, value):
    yf.export_folder(_filled(value), folder / "model", proof="sample", overwrite=True)


def _read_folder(folder):
    """The manifest, the cases, the weights and the tokens belong together."""
    assert yf.verify_folder(folder / "model")
    graph = onnx.load(folder / "model" / "model.onnx").graph
    norms = [onnx.numpy_helper.to_array(one) for one in graph.initializer if one.name.endswith("norm.weight")]
    (value,) = {float(number) for norm in norms for number in norm.flatten()} - {1.0}
    return value


def _write_checkpoint(folder, value):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    rp.save_checkpoint(folder / "c", model, data={"value": value}, keep=1)


def _read_checkpoint(folder):
    model = torch.nn.Linear(3, 2)
    assert rp.load_checkpoint(folder / "c", model) is not None
    (value,) = set(model.weight.flatten().tolist())
    return float(value)


def _write_model(folder, value):
    save_model(_filled(value), ByteTokenizer(), folder / "model", source=tiny.source(), overwrite=True)


def _read_model(folder):
    (value,) = set(model_source(folder / "model").load().model.norm.weight.tolist())
    return float(value)


def _write_program(folder, value):
    yf.export_program(_Scaled(value).eval(), (X,), cases=[], proof="none").save(folder / "model.pt2")


def _read_program(folder):
    with torch.no_grad():
        return float(torch.export.load(folder / "model.pt2").module()(X).mean())


def _write_timeline(folder, value):
    timeline = rp.Timeline()
    timeline.records = [rp.Record(0, 1, "virtual:0", "forward", 0.0, value)]
    timeline.save(folder / "step.json")


def _read_timeline(folder):
    (record,) = merge_timelines([folder / "step.json"]).records
    return record.end


# What writes into a folder, and what reads the value back, which fails where files do not belong together.
WRITERS = {
    "export_onnx": (_write_onnx, lambda folder: _run_onnx(folder / "model.onnx")),
    "quantize": (functools.partial(_write_onnx, quantize="int8"), lambda folder: _run_onnx(folder / "model.onnx")),
    "save_nested": (_write_nested, _read_nested),
    "export_folder": (_write_folder, _read_folder),
    "save_checkpoint": (_write_checkpoint, _read_checkpoint),
    "save_model": (_write_model, _read_model),
    "program": (_write_program, _read_program),
    "timeline": (_write_timeline, _read_timeline),
}


def value_of(name: str, folder: pathlib.Path) -> int:
    """Return the value with which the files in a folder were written."""
    return round(WRITERS[name][1](folder))


class _Events:
    """Counts what is done to files in a folder, and ends the process at one of them."""

    def __init__(self, folder: str, last: int) -> None:
        self.folder, self.last, self.count = folder, last, 0
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"):
            return
        if event == "open":
            mode, flags = given[1] or "", given[2] or 0
            if not any(sign in mode for sign in "wax+") and not flags & (os.O_WRONLY | os.O_RDWR):
                return
        if not isinstance(given[0], (str, bytes)) or self.folder not in os.path.abspath(os.fsdecode(given[0])):
            return
        self.count += 1
        if self.count == self.last:
            os._exit(9)


if __name__ == "__main__":
    torch.manual_seed(0)
    name, folder, value, *event = sys.argv[1:]
    events = _Events(os.path.abspath(folder), int(event[0]) if event else 0)
    WRITERS[name][0](pathlib.Path(folder), float(value))
    sys.stdout.write(f"events {events.count}\n")
