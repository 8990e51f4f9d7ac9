"""Files of a checkpoint: values, manifest, folder, tensors and those that transformers reads."""

import collections
import hashlib
import importlib.util
import json
import math
import os

import numpy
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from matrix.models import make_model
from roundpipe_runtime import RoundPipe, list_checkpoints, save_checkpoint, wrap_model_to_roundpipe
from roundpipe_runtime.checkpoint import CheckpointError, DamagedCheckpointError
from roundpipe_runtime.checkpoint import folder as folder_module
from roundpipe_runtime.checkpoint.folder import MANIFEST, is_complete, next_path, verify, write_manifest
from roundpipe_runtime.checkpoint.tensor_files import decode, encode, need_safetensors, open_tensors, write_tensors
from roundpipe_runtime.checkpoint.training_state import config_files
from tests.runtime.small import names
from tests.runtime.tiny_training import same_bits
from yobx_flatten import MissingDependencyError


def round_trip(value):
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "value", tensors), allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        2**70, 0.1, 5e-324, math.inf, -math.inf, math.nan, b"\x00\xff", (0.9, (0.99,)), 1 + 2j, {"a": 1, "$tensor": 2},
        {0: "zero", (1, 2): "pair", None: "none"}, {"$tuple": [1]}, {3, 1},
        collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter({30: 2, 10: 1}),
        collections.deque([1, 2], maxlen=5), torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1),
        (3, tuple(range(625)), None),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    found = round_trip(value)
    assert found == value or math.isnan(value)  # NaN has no word in JSON
    assert type(found) is type(value)


KEYS = st.text(max_size=8) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | KEYS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
)


@given(VALUES)
def test_any_nest_comes_back(value):
    """Classes included, which `==` does not tell apart: 1 and True, 0.0 and -0.0."""
    assert repr(round_trip(value)) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_tensor_comes_back_as_a_copy(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    found = round_trip([tensor])[0]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    found.zero_()
    assert tensor.all()


def test_arrays_and_scalars_of_numpy_and_names_of_tensors_which_are_their_places():
    """What a state of NumPy's generator is made of."""
    found = round_trip({"key": numpy.arange(4, dtype=numpy.uint32), "loss": numpy.float64(0.1)})
    assert found["key"].dtype == numpy.uint32
    assert found["key"].tolist() == [0, 1, 2, 3]
    assert type(found["loss"]) is numpy.float64
    assert found["loss"] == 0.1
    tensors: dict[str, torch.Tensor] = {}
    encode({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "root", tensors)
    assert {name: tensor.item() for name, tensor in tensors.items()} == {"root.a.b": 0.0, "root.a.b~2": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"position\.x is a torch\._C\.Generator.*\n    generator\.get_state\(\)"),
        (torch.nn.Linear(1, 1), r"position\.x is a torch.*Linear.*\n    x\.state_dict\(\)"),
        (object(), r"position\.x is a builtins\.object, which a checkpoint cannot contain"),
        (torch.eye(2).to_sparse(), r"position\.x is a Tensor of layout torch\.sparse_coo"),
        (numpy.array(["text"]), r"position\.x is an array of <U4"),
    ],
)
def test_what_cannot_be_stored_is_named(value, message):
    """Nothing is pickled: the place, the class, and the line to type."""
    with pytest.raises(CheckpointError, match=message):
        encode({"x": value}, "position", {})


def test_a_tensor_that_is_made_of_others_is_stored_as_these():
    """Moments in 8 bits are such; their class is one that its library gave to torch as safe to load."""
    moment = TwoTensor(torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    with torch.serialization.safe_globals([TwoTensor]):
        found = round_trip({"moment": moment})["moment"]
    assert type(found) is TwoTensor
    assert torch.equal(found.a, moment.a)
    assert torch.equal(found.b, moment.b)
    assert found.a is not moment.a


def test_a_class_that_torch_does_not_know_is_not_imported():
    """A file could name any; the error states which import makes it known."""
    with pytest.raises(CheckpointError, match=r"class TwoTensor.*\n    import torch.testing._internal.two_tensor"):
        round_trip(TwoTensor(torch.ones(2), torch.ones(2)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.bin").write_bytes(b"first file")
    (tmp_path / "two.bin").write_bytes(bytes(1000))
    write_manifest(tmp_path)
    return tmp_path


def test_the_manifest_holds_sizes_and_sha256(folder):
    """`sha256sum` gives the same."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files["one.bin"] == {"bytes": 10, "sha256": hashlib.sha256(b"first file").hexdigest()}
    assert set(files) == {"one.bin", "two.bin"}


def changed(content):
    return lambda folder: (folder / MANIFEST).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "two.bin").write_bytes(bytes(999)), r"two\.bin has 999 bytes, but 1000 were written"),
        (lambda folder: (folder / "one.bin").unlink(), r"names the file 'one\.bin', which does not exist"),
        (lambda folder: (folder / MANIFEST).unlink(), r"checkpoint\.json is missing"),
        (changed('{"format": 1, "fil'), r"checkpoint\.json is damaged: it is not JSON"),
        (changed(""), r"checkpoint\.json is damaged: it is empty"),
        (changed('{"format": 1, "files": ["one.bin"]}'), r"checkpoint\.json is damaged: "),
        (
            changed('{"format": 1, "files": {"../one.bin": {"bytes": 1, "sha256": ""}}}'),
            r"names the file '\.\./one\.bin', which is not in the folder",
        ),
    ],
)
def test_what_is_missing_is_named(folder, damage, message):
    damage(folder)
    assert not is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=message):
        verify(folder)


def test_one_flipped_bit_is_seen_by_its_checksum(folder):
    content = bytearray((folder / "two.bin").read_bytes())
    content[500] ^= 1
    (folder / "two.bin").write_bytes(content)
    assert is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=r"two\.bin was changed after it was written"):
        verify(folder)


def test_a_newer_format_is_not_damage(folder):
    """Falling back to an older checkpoint would lose work that is there."""
    (folder / MANIFEST).write_text(json.dumps({**json.loads((folder / MANIFEST).read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="has the unknown format 2") as caught:
        verify(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


def make(folder, count):
    for _ in range(count):
        with folder_module.appearing(next_path(folder)) as half:
            (half / "data").write_text("x")


def test_files_are_on_the_disk_before_the_name_is_there(tmp_path, monkeypatch):
    """Data, manifest, their folder; then the name; then the folder around it."""
    done = []
    real_fsync, real_rename = os.fsync, folder_module.pathlib.Path.rename

    def fsync(number):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        real_fsync(number)

    def rename(path, target):
        done.append(f"{path.name} -> {target.name}")
        return real_rename(path, target)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("the names of open files are not to be had here")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folder_module.pathlib.Path, "rename", rename)
    make(tmp_path, 1)
    half = ".checkpoint-00000001.writing"
    assert done == ["data", "checkpoint.json", half, f"{half} -> checkpoint-00000001", tmp_path.name]


def test_a_checkpoint_that_misses_a_file_is_not_counted_and_numbers_sort_as_numbers(tmp_path):
    make(tmp_path, 4)
    (tmp_path / "checkpoint-00000003" / "data").unlink()
    folder_module.remove_old(tmp_path, 2)
    assert names(tmp_path) == [f"checkpoint-0000000{number}" for number in (2, 3, 4)]
    for number in (99999999, 100000000):  # past eight digits
        (tmp_path / f"checkpoint-{number}").mkdir()
    assert next_path(tmp_path).name == "checkpoint-100000001"


TENSORS = {"a": torch.arange(4.0), "b": torch.ones(4), "c": torch.zeros(8), "d": torch.tensor(3)}


def test_shards_with_an_index_or_one_file_if_it_fits(tmp_path):
    """32 bytes a file: two of 16, one of 32, one of 8; the index says which tensor is where."""
    write_tensors(tmp_path, "whole", TENSORS, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.safetensors"]
    write_tensors(tmp_path, "model", TENSORS, 32)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("model*")) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    assert index["metadata"]["total_size"] == 16 + 16 + 32 + 8


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["four", "none"])
@pytest.mark.parametrize("limit", [1, 32, 10**9])
def test_all_of_it_is_read_again(tmp_path, tensors, limit):
    write_tensors(tmp_path, "training", tensors, limit)
    with open_tensors(tmp_path, "training") as found:
        assert list(found) == list(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_without_safetensors_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[train\]'"):
        need_safetensors()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "gemma3_text", "seq2seq:t5"])
def test_from_pretrained_reads_it(tmp_path, name):
    model = make_model(name)
    pipe = wrap_model_to_roundpipe(model, check=False, devices="virtual:2")
    saved = save_checkpoint(tmp_path, pipe)
    found, report = type(model).from_pretrained(saved, output_loading_info=True)
    assert same_bits(found.state_dict(), model.state_dict())
    assert not any(report.values())


def test_the_auto_class_knows_what_it_is_reads_shards_and_generates_as_configured(tmp_path):
    model = make_model("llama").bfloat16()
    model.generation_config.max_new_tokens = 7
    saved = save_checkpoint(tmp_path, model, max_shard_bytes=20_000)
    assert len(list(saved.path.glob("model-*-of-*.safetensors"))) > 1
    found = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert type(found) is type(model)
    assert found.dtype == torch.bfloat16
    assert found.generation_config.max_new_tokens == 7
    assert same_bits(found.state_dict(), model.state_dict())
    assert model.config.architectures is None


def test_other_models_have_no_configuration(tmp_path):
    """A `config` attribute alone makes no model of transformers."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.config = make_model("llama").config
    assert config_files(module) == {}
    assert config_files(RoundPipe(module, devices="virtual:1")) == {}
    save_checkpoint(tmp_path, module)
    assert not (list_checkpoints(tmp_path)[0].path / "config.json").exists()
