"""A program of a stranger is loaded without its pickles; one with registered classes needs no trust."""

import io
import pathlib
import zipfile

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import make_model
from yobx_flatten import DecodeSizes, decode_inputs, export_program
from yobx_flatten.errors import UntrustedFileError
from yobx_flatten.generate.program_generator import ProgramGenerator
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.program_runner import open_program

RAN = []


def run(value):
    """What a payload chose to call."""
    RAN.append(value)


class Payload:
    """Runs a function when it is unpickled."""

    def __reduce__(self):
        return run, (1,)


def pickled(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A decoder with a cache among its example inputs, which torch's restricted unpickler alone refuses."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    export_program(make_model("llama"), kwargs=decode_inputs(make_model("llama"), DecodeSizes()), cases=[]).save(path)
    return path


def changed(source: pathlib.Path, target: pathlib.Path, **entries):
    """A copy in which entries whose names hold a word have other contents."""
    count = 0
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            word = next((word for word in entries if word in name), None)
            count += word is not None
            new.writestr(name, old.read(name) if word is None else entries[word])
    assert count
    return target


@pytest.mark.slow
def test_registered_classes_need_no_trust(program):
    """And `torch.load` is torch's own before and after."""
    before = torch.load
    prompt = torch.tensor([[5, 6, 7]])
    assert ProgramGenerator(program).generate(prompt, max_new_tokens=2).shape == (1, 5)
    assert open_runner(program).slots
    assert torch.load is before


@pytest.mark.slow
@pytest.mark.parametrize("open_it", [open_program, open_runner, ProgramGenerator], ids=lambda f: f.__name__)
def test_a_pickle_of_a_stranger_does_not_run(program, tmp_path, open_it):
    """In every door; `torch.load` is put back after the refusal."""
    before, file = torch.load, changed(program, tmp_path / "model.pt2", sample_inputs=pickled(Payload()))
    with pytest.raises(UntrustedFileError, match=r"more than tensors and registered classes(.|\n)*trust=True"):
        open_it(file)
    assert RAN == []
    assert torch.load is before


@pytest.mark.slow
def test_trust_reads_what_torch_reads(program, tmp_path):
    """A caller who knows the author gets torch's reader, pickles included."""
    given = {"args": (), "kwargs": {}, "payload": Payload()}
    file = changed(program, tmp_path / "model.pt2", sample_inputs=pickled(((), given)))
    try:
        open_program(file, trust=True)
    finally:
        ran = RAN.copy()
        RAN.clear()
    assert ran == [1]
