"""Recorded calls on disk: complete files, bit-equal, readable in a fresh process, and clear about damage."""

import json
import os
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import fresh_process
from tests.cache_words import WORD
from tests.flatten.record.record_models import generate_inputs, make_generator
from yobx_flatten import NotRegisteredError, RecordedCalls, RecordError, StaticDataError, record_calls

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128, torch.int8]


class Passes(torch.nn.Module):
    def forward(self, x, **more):
        return {"x": x, **more}


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_every_kind_of_leaf_comes_back_bit_equal(tmp_path):
    torch.manual_seed(0)
    tensors = {f"t{i}": (torch.rand(2, 3) * 4).to(dtype) for i, dtype in enumerate(DTYPES)}
    given = {
        **tensors,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "rest": (1, 2.5, "a", None, [True]),
    }
    model = Passes()
    with record_calls(model, to=tmp_path / "calls") as calls:
        model(torch.ones(1), **given)
    loaded = RecordedCalls.load(tmp_path / "calls")
    for found in (calls[0].outputs, loaded[0].outputs):
        assert found["rest"] == given["rest"]
        for name, tensor in given.items():
            if isinstance(tensor, torch.Tensor):
                assert found[name].dtype is tensor.dtype
                assert found[name].shape == tensor.shape
                assert torch.equal(as_bytes(found[name]), as_bytes(tensor))


def test_a_file_per_call_appears_when_it_is_complete(tmp_path):
    model = Passes()
    with record_calls(model, to=tmp_path) as calls:
        for rows in (1, 2):
            model(torch.ones(rows))
            assert len(list(tmp_path.iterdir())) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-00000.safetensors", "call-00001.safetensors"]
    assert tuple(calls[1].inputs["x"].shape) == (2,)


def test_a_generate_is_loaded_by_a_fresh_process(tmp_path):
    model = make_generator("mistral")
    with record_calls(model, to=tmp_path) as calls, torch.no_grad():
        model.generate(**generate_inputs("mistral"), max_new_tokens=3, do_sample=False)
    program = textwrap.dedent(
        f"""
        import transformers
        from yobx_flatten import RecordedCalls
        calls = RecordedCalls.load({str(tmp_path)!r})
        cache = calls["decode"][1].inputs[{WORD!r}]
        print(repr(calls), type(cache).__name__, cache.layers[0].cumulative_length, cache.layers[0].sliding_window)
        print(calls)
        """
    )
    found = fresh_process.run("-c", program).stdout
    first = "<3 calls of MistralForCausalLM.forward (prefill: 1, decode: 2)> DynamicCache 9 8"
    assert found == f"{first}\n{calls}\n"


def test_a_model_is_named_when_the_calls_are_exported(tmp_path):
    model = Passes()
    with record_calls(model, to=tmp_path):
        model(torch.ones(2))
    with pytest.raises(RecordError, match=r"RecordedCalls.load\(folder, model\)"):
        RecordedCalls.load(tmp_path).module()
    assert RecordedCalls.load(tmp_path, model).module()(x=torch.ones(3))["x"].shape == (3,)


def test_a_folder_with_calls_is_not_written_into(tmp_path):
    """Two recordings in one folder would be mixed."""
    model = Passes()
    with record_calls(model, to=tmp_path):
        model(torch.ones(2))
    with pytest.raises(RecordError, match="holds recorded calls already"), record_calls(model, to=tmp_path):
        pass
    assert "forward" not in vars(model)


def test_an_empty_folder_is_said_to_be_empty(tmp_path):
    with pytest.raises(RecordError, match="contains no recorded calls"):
        RecordedCalls.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is damaged"),
        (b"\x10\0\0\0", "is damaged"),
        (b"\x40" + b"\0" * 7 + b"{}", "is damaged"),
        (b"not a file of tensors", "is not a safetensors file"),
        (b"\x10" + b"\x00" * 7 + b"{}" + b" " * 14, "is not a recorded call"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path, content, found):
    (tmp_path / "call-00000.safetensors").write_bytes(content)
    with pytest.raises(RecordError, match=rf"call-00000\.safetensors {found}"):
        RecordedCalls.load(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_pipe_among_the_calls_is_not_waited_for(tmp_path):
    """safetensors would open it, and wait for somebody who writes."""
    os.mkfifo(tmp_path / "call-00000.safetensors")
    with pytest.raises(RecordError, match="not a regular file"):
        RecordedCalls.load(tmp_path)


def test_a_spec_with_an_enum_imports_no_module(tmp_path, monkeypatch):
    """torch imports whatever module stands there."""
    (tmp_path / "stranger.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    model, folder = Passes(), tmp_path / "calls"
    with record_calls(model, to=folder):
        model(torch.zeros(2))
    file = folder / "call-00000.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    call = json.loads(header["__metadata__"]["yobx_flatten.call"])
    version, spec = json.loads(call["inputs"]["spec"])
    spec["context"] = json.dumps([{"__enum__": True, "fqn": "stranger:x", "name": "a"}])
    call["inputs"]["spec"] = json.dumps([version, spec])
    header["__metadata__"]["yobx_flatten.call"] = json.dumps(call)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(NotRegisteredError, match="import stranger"):
        RecordedCalls.load(folder)


def test_a_call_of_a_newer_version_says_what_to_do(tmp_path):
    model, file = Passes(), tmp_path / "call-00000.safetensors"
    with record_calls(model, to=tmp_path):
        model(torch.ones(2))
    with safe_open(file, framework="pt") as opened:
        metadata = {key: text.replace('"version": 1', '"version": 2') for key, text in opened.metadata().items()}
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(RecordError, match=r"(?s)needs a newer yobx-flatten:.*pip install --upgrade yobx-flatten"):
        RecordedCalls.load(tmp_path)


def test_calls_are_replayed_in_any_function(tmp_path):
    model = Passes()
    with record_calls(model) as calls:
        for rows in (2, 3):
            model(torch.ones(rows), scale=3)
    assert calls.replay(lambda x: {"x": x, "scale": 3}).ok
    assert not calls.replay(lambda x: {"x": x + 1, "scale": 3}).ok


def test_a_call_that_cannot_be_stored_leaves_no_file(tmp_path):
    model = Passes()
    with pytest.raises(StaticDataError, match="at streamer"), record_calls(model, to=tmp_path):
        model(torch.ones(2), streamer=object())
    assert list(tmp_path.iterdir()) == []


class Looks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 4)

    def forward(self, ids, factor=1):
        ids.add_(0)
        return self.table(ids) * factor

    def encode(self, *, rows):
        rows.fill_(0)  # before it raises
        raise ValueError(f"no rows: {len(rows)}")


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_call_that_raises_is_kept_and_raises_again(tmp_path, on_disk):
    """The call that a user wants to look at was the one that was dropped."""
    model, bad = Looks(), torch.tensor([[4, 25]])
    to = tmp_path / "calls" if on_disk else None
    with record_calls(model, to=to) as calls:
        model(torch.tensor([[1, 2]]))
        with pytest.raises(IndexError) as raised:
            model(bad, factor=2)
        model(torch.tensor([[3]]))
    assert not hasattr(raised.value, "__notes__")
    if on_disk:
        calls = RecordedCalls.load(to)
    (failed,) = calls.failed
    assert [call.index for call in calls] == [0, 2]
    assert (failed.index, failed.error) == (1, f"IndexError: {raised.value}")
    assert torch.equal(failed.inputs["ids"], bad)
    with pytest.raises(IndexError, match=str(raised.value)):
        model(*failed.args, **failed.kwargs)
    with pytest.raises(RecordError, match=r"call 1 returned nothing\. It raised IndexError"):
        _ = failed.outputs
    assert "raised IndexError" in repr(failed)


def test_a_failed_call_keeps_what_was_there_before_it(tmp_path):
    model = Looks()
    with record_calls(model, method="encode", to=tmp_path / "calls", limit=2):
        for rows in (1, 2, 3):
            with pytest.raises(ValueError, match=f"no rows: {rows}"):
                model.encode(rows=torch.ones(rows, 2))
    found = RecordedCalls.load(tmp_path / "calls").failed
    assert [call.inputs["rows"].tolist() for call in found] == [[[1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]


def test_the_error_of_the_call_comes_out_where_it_cannot_be_stored(tmp_path):
    model = Looks()
    with record_calls(model, to=tmp_path / "calls") as calls:
        (tmp_path / "calls").rmdir()
        (tmp_path / "calls").write_text("a file")
        with pytest.raises(IndexError) as raised:
            model(torch.tensor([25]))
    assert "could not store this call" in raised.value.__notes__[0]
    assert torch.equal(calls.failed[0].inputs["ids"], torch.tensor([25]))
