"""Recording keeps copies of what went in and came out, leaves the model as it was, and stores calls on disk."""

import concurrent.futures
import copy
import dataclasses
import json
import os
import textwrap
import threading

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import fresh_process
from tests.cache_words import WORD
from tests.flatten.export.record.record_models import generate_inputs, make_generator
from tests.modules import module_class, module_of
from yobx_flatten import RecordedCalls, record_calls, register_flattening_functions
from yobx_flatten.errors import InvalidArgumentError, NotRegisteredError, RecordError, StaticDataError


class Adds(torch.nn.Module):
    def forward(self, x, y=1):
        return x + y

    def encode(self, x):
        return {"encoded": self(x, 2) * 2}


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    mode: str = "mean"


def test_arguments_are_kept_by_name_however_they_were_passed():
    starred = module_of(lambda self, x, /, y, *rest, scale=1, **more: (x + y + sum(rest)) * scale + more["offset"])
    model, one = Adds(), torch.ones(2)
    with record_calls(model) as calls, record_calls(starred) as others:
        model(one, one)
        model(y=3, x=torch.zeros(2))
        starred(one, one, one, one, scale=2, offset=5)
        starred(one, y=one, offset=5)
    assert [list(call.inputs) for call in calls] == [["x", "y"], ["x", "y"]]
    assert (calls[1].args, calls[1].kwargs["y"]) == ((), 3)
    assert torch.equal(calls[0].outputs, torch.full((2,), 2.0))
    # positional-only and starred arguments come back by position
    assert [len(call.args) for call in others] == [4, 1]
    for call in others:
        assert torch.equal(starred(*call.args, **call.kwargs), call.outputs)


def test_a_record_is_not_changed_by_what_happens_to_its_tensors():
    memory = torch.zeros(4)
    model = module_class("Writes", lambda self, x: memory.add_(1)[:2])()
    with record_calls(model) as calls:
        model(memory[2:])
        model(memory[2:])
    assert [call.inputs["x"].tolist() for call in calls] == [[0, 0], [1, 1]]
    assert [call.outputs.tolist() for call in calls] == [[1, 1], [2, 2]]


def test_what_is_read_off_a_record_is_a_contiguous_detached_copy():
    model = Adds()
    x = torch.arange(12, dtype=torch.bfloat16).reshape(2, 6).requires_grad_()[:, 2:]
    with record_calls(model) as calls:
        model(x)
    found = calls[0].inputs["x"]
    assert found.dtype is torch.bfloat16
    assert not found.requires_grad
    assert not calls[0].outputs.requires_grad
    assert (found.stride(), calls.example()["x"].stride()) == ((4, 1), (4, 1))
    found.fill_(-9)
    calls.example()["x"].fill_(-9)
    assert torch.equal(calls[0].inputs["x"], x)


def test_a_cache_is_kept_as_it_was_before_the_call():

    def forward(self, x, past_key_values):
        past_key_values.update(x, x, 0)
        return past_key_values

    model, cache, x = module_of(forward), transformers.DynamicCache(), torch.ones(1, 2, 3, 4)
    with record_calls(model) as calls:
        model(x, cache)
        with register_flattening_functions(patch_transformers=True):
            model(x, cache)
    assert [call.inputs["past_key_values"].get_seq_length() for call in calls] == [0, 3]
    assert [call.outputs.get_seq_length() for call in calls] == [3, 6]
    assert [(call.kind, call.past, call.new) for call in calls] == [("prefill", 0, 3), ("decode", 3, 3)]


def test_a_class_that_nobody_registered_is_named_with_the_line_to_type():
    ran = []

    model = module_class("Reads", lambda self, state: ran.append(state))()
    with pytest.raises(NotRegisteredError, match=r"inputs\['state'\] is a .*State(.|\n)*register"), record_calls(model):
        model(State(torch.zeros(2)))
    assert ran == []
    assert "forward" not in vars(model)


def test_limit_records_the_first_calls_that_return_and_outputs_may_be_left_out():
    model = Adds()
    with record_calls(model, limit=2, outputs=False) as calls:
        model(torch.ones(1))
        with pytest.raises(TypeError):
            model("text")
        model(torch.ones(2)), model(torch.ones(3))
    assert [tuple(call.inputs["x"].shape) for call in calls] == [(1,), (2,)]
    with pytest.raises(RecordError, match="outputs=True"):
        _ = calls[0].outputs


def test_a_method_is_recorded_by_name_or_as_it_is():
    model = Adds()
    with (
        record_calls(model, method="encode") as by_name,
        record_calls(model.encode) as bound,
        record_calls(model) as own,
    ):
        model.encode(torch.ones(2))
    assert len(by_name) == len(bound) == len(own) == 1
    assert by_name[0].outputs["encoded"].tolist() == [6, 6]
    assert vars(model).keys() == vars(Adds()).keys()


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        *((target, {}, "expected a module, or a method") for target in (Adds, 3, torch.add, lambda x: x)),
        *((Adds(), {"limit": limit}, "limit must be a number of 1 or more") for limit in (0, -1, 2.5, True)),
        (Adds(), {"method": "decode"}, "Adds has no method 'decode'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_something_is_replaced(target, options, said):
    with pytest.raises(InvalidArgumentError, match=said), record_calls(target, **options):
        pass
    assert not isinstance(target, Adds) or "forward" not in vars(target)


def test_the_model_is_as_it_was_after_an_exception():
    model, found = Adds(), []

    def record():
        with record_calls(model) as calls:
            found.append(calls)
            model(torch.ones(1))
            model("half-way")

    with pytest.raises(TypeError, match="str"):
        record()
    assert "forward" not in vars(model)
    assert len(found[0]) == 1


def test_recordings_may_be_left_in_any_order_and_what_others_put_on_the_model_stays():
    model = Adds()
    own = model.forward = lambda x: x * 5
    first, second = record_calls(model), record_calls(model)
    one, two = first.__enter__(), second.__enter__()
    assert model(torch.ones(1)).item() == 5
    first.__exit__(None, None, None)
    model(torch.ones(1))
    second.__exit__(None, None, None)
    model(torch.ones(1))
    assert (len(one), len(two)) == (1, 2)
    assert model.forward is own
    with record_calls(model) as calls:
        inner = model.forward
        outer = model.forward = lambda x: inner(x) * 2
        model(torch.ones(1))
    assert model.forward is outer
    assert model(torch.ones(1)).item() == 10
    assert len(calls) == 1


def test_neither_a_deep_copy_made_meanwhile_nor_a_trace_is_recorded():
    """The tensors of a trace are placeholders."""
    model = torch.nn.Linear(2, 2)
    with record_calls(model) as calls:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.weight.zero_(), twin.bias.zero_()
        assert twin(torch.ones(1, 2)).abs().sum() == 0
        torch.export.export(model, (torch.ones(1, 2),))
    assert len(calls) == 0


def test_calls_of_several_threads_are_all_recorded():
    model, barrier = Adds(), threading.Barrier(4)

    def work(number):
        barrier.wait()
        for _ in range(20):
            model(torch.full((2,), float(number)))

    with record_calls(model) as calls, concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [call.index for call in calls] == list(range(80))
    assert all(torch.equal(call.outputs, call.inputs["x"] + 1) for call in calls)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128, torch.int8]


Passes = module_class("Passes", lambda self, x, **more: {"x": x, **more})


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
    """Two recordings in one folder would be mixed; a model is named when the calls are exported."""
    model = Passes()
    with record_calls(model, to=tmp_path) as calls:
        for rows in (1, 2):
            model(torch.ones(rows))
            assert len(list(tmp_path.iterdir())) == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-00000.safetensors", "call-00001.safetensors"]
    assert tuple(calls[1].inputs["x"].shape) == (2,)
    with pytest.raises(RecordError, match="holds recorded calls already"), record_calls(model, to=tmp_path):
        pass
    assert "forward" not in vars(model)
    with pytest.raises(RecordError, match=r"RecordedCalls.load\(folder, model\)"):
        RecordedCalls.load(tmp_path).module()
    assert RecordedCalls.load(tmp_path, model).module()(x=torch.ones(3))["x"].shape == (3,)
    with pytest.raises(RecordError, match="contains no recorded calls"):
        RecordedCalls.load(tmp_path / "nothing")


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
    if os.name == "posix":  # safetensors would open a pipe, and wait for somebody who writes
        (tmp_path / "call-00000.safetensors").unlink()
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
    with pytest.raises(RecordError, match="call 1 has no outputs, because it raised IndexError"):
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
