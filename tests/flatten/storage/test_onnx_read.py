"""A damaged, truncated or foreign file is a clear error."""

import json
import zlib

import numpy as np
import onnx
import pytest
import torch

from tests.flatten.storage.storage_values import State
from yobx_flatten import (
    DamagedFileError,
    FlattenError,
    ForeignFileError,
    InvalidArgumentError,
    create_input_tensors_from_onnx_model,
    load_case,
    load_nested,
    save_case,
    save_nested,
)

VALUES = {"x": torch.arange(1000.0), "half": torch.ones(3, dtype=torch.bfloat16), "text": "née", "state": State(1, [2])}


@pytest.fixture
def path(tmp_path):
    save_nested(tmp_path / "x.onnx", VALUES, external_data=True)
    return tmp_path / "x.onnx"


def edit(path, change):
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def initializer(model, name):
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def metadata(model, key):
    return next(entry for entry in model.metadata_props if entry.key == key)


def edit_structure(path, change):
    def edited(model):
        structure = metadata(model, "yobx_flatten.structure")
        data = json.loads(structure.value)
        change(data)
        structure.value = json.dumps(data)
        metadata(model, "yobx_flatten.structure_crc32").value = str(zlib.crc32(structure.value.encode()))

    edit(path, edited)


@pytest.mark.parametrize("texts", [np.array(["a", "bc"]), np.str_("a"), np.array([["a"], ["b"]])], ids=repr)
@pytest.mark.parametrize("letters", [300_000_000, 500_000_000])
def test_texts_take_the_room_of_what_is_stored(tmp_path, texts, letters):
    """NumPy gives each text the room of the longest: a file of 1 kB stated 2 GB."""
    save_nested(tmp_path / "x.onnx", {"x": texts})
    edit_structure(tmp_path / "x.onnx", lambda data: data["children"][0].update(dtype=f"<U{letters}"))
    with pytest.raises(DamagedFileError, match=f"needs texts of {letters} letters, more than 1 GB"):
        load_nested(tmp_path / "x.onnx")


def test_a_file_that_is_not_there_is_what_python_says(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.onnx"):
        load_nested(tmp_path / "x.onnx")


EMPTY_MODEL = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])).SerializeToString()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"x\.onnx is empty"),
        (b"once upon a time, there was a file\n" * 10, r"x\.onnx"),
        (EMPTY_MODEL, r"x\.onnx contains no nested values.*save_nested"),
    ],
    ids=["empty", "a text", "a model"],
)
def test_a_file_of_something_else_is_named(tmp_path, content, said):
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises((DamagedFileError, ForeignFileError), match=said):
        load_nested(tmp_path / "x.onnx")


def test_every_truncation_is_an_error(path):
    for file in (path, path.with_name("x.onnx.data")):
        whole = file.read_bytes()
        for length in [*range(0, len(whole), 97), len(whole) - 1]:
            file.write_bytes(whole[:length])
            with pytest.raises((DamagedFileError, ForeignFileError)):
                load_nested(path)
        file.write_bytes(whole)
    load_nested(path)


def test_every_changed_byte_is_an_error_or_changes_nothing(path):
    """What is read is what was written, or nothing is read. Some bytes are names that only other programs read."""
    for file in (path, path.with_name("x.onnx.data")):
        whole = bytearray(file.read_bytes())
        for place in range(0, len(whole), 13):
            whole[place] ^= 0x41
            file.write_bytes(whole)
            try:
                found = load_nested(path)
            except FlattenError:
                pass
            else:
                assert torch.equal(found["x"], VALUES["x"])
                assert torch.equal(found["half"], VALUES["half"])
                assert (found["text"], found["state"]) == (VALUES["text"], VALUES["state"])
            whole[place] ^= 0x41
        file.write_bytes(whole)


def test_a_changed_number_is_named(path):
    data = path.with_name("x.onnx.data")
    whole = bytearray(data.read_bytes())
    whole[100] ^= 1
    data.write_bytes(whole)
    with pytest.raises(DamagedFileError, match=r"x\.onnx is damaged: 'x' has a wrong checksum"):
        load_nested(path)


def test_the_second_file_is_asked_for_by_name(path):
    path.with_name("x.onnx.data").unlink()
    with pytest.raises(DamagedFileError, match=r"'x' is stored in x\.onnx\.data, which is not there; keep the two"):
        load_nested(path)


def test_both_files_may_move_together(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for file in (path, path.with_name("x.onnx.data")):
        file.rename(tmp_path / "elsewhere" / file.name)
    assert torch.equal(load_nested(tmp_path / "elsewhere" / "x.onnx")["x"], VALUES["x"])


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "..", "", "a/b"])
def test_a_file_reads_nothing_but_what_is_beside_it(path, location):
    def change(model):
        initializer(model, "x").external_data[0].value = location

    edit(path, change)
    with pytest.raises(DamagedFileError, match="not a file in the same folder"):
        load_nested(path)


def test_a_huge_size_is_refused_before_memory_is_asked_for(path):

    def grow(model):
        tensor = initializer(model, "x")
        tensor.dims[0] = 2**58
        tensor.external_data[2].value = str(2**60)

    edit(path, grow)
    edit_structure(path, lambda data: data["children"][0].update(shape=[2**58]))
    with pytest.raises(DamagedFileError, match="ends at byte"):
        load_nested(path)


def test_a_structure_that_is_too_deep_is_an_error(path):

    def deepen(model):
        text = "[" * 100_000 + "]" * 100_000
        metadata(model, "yobx_flatten.structure").value = text
        metadata(model, "yobx_flatten.structure_crc32").value = str(zlib.crc32(text.encode()))

    edit(path, deepen)
    with pytest.raises(DamagedFileError):
        load_nested(path)


def test_a_changed_initializer_is_named(tmp_path):
    words = {"words": np.array(["née", "b"], dtype=object), "x": torch.arange(1000.0)}
    changes = {
        "'words' has 1 elements": lambda model: initializer(model, "words").string_data.pop(),
        "'words' has a wrong checksum": lambda model: initializer(model, "words").string_data.reverse(),
        "'x' has 4004 bytes instead of 4000": lambda model: setattr(
            initializer(model, "x").external_data[2], "value", "4004"
        ),
    }
    for words_of_error, change in changes.items():
        path = tmp_path / "words.onnx"
        save_nested(path, words, external_data=True)
        assert load_nested(path)["words"].tolist() == ["née", "b"]
        edit(path, change)
        with pytest.raises(DamagedFileError, match=words_of_error):
            load_nested(path)


def test_a_newer_version_says_what_to_do(path):
    edit(path, lambda model: setattr(metadata(model, "yobx_flatten.format_version"), "value", "2"))
    with pytest.raises(ForeignFileError, match=r"version '2' of the format.*\n    pip install --upgrade yobx-flatten"):
        load_nested(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["children"][0].update(leaf="no such kind"),
        lambda data: data["children"][0].update(dtype="no_such_dtype"),
        lambda data: data["children"][0].update(dtype="load"),
        lambda data: data["children"][0].update(shape=[-1000]),
        lambda data: data["children"][0].update(shape=[10, 10]),
        lambda data: data["children"][0].update(shape="abc"),
        lambda data: data["children"][0].update(name="missing"),
        lambda data: data["children"][0].pop("crc32"),
        lambda data: data["children"][0].clear(),
        lambda data: data["children"].pop(),
        lambda data: data.update(children=3),
        lambda data: data.update(static=3),
        lambda data: data["children"].append(3),
    ],
)
def test_a_structure_that_does_not_fit_is_an_error(path, change):
    edit_structure(path, change)
    with pytest.raises(DamagedFileError):
        load_nested(path)


def test_a_case_is_read_as_a_case(tmp_path):
    save_case(tmp_path / "case.onnx", {"x": 1}, 2)
    save_nested(tmp_path / "nested.onnx", {"x": 1})
    with pytest.raises(ForeignFileError, match=r"holds 'case', not 'values'\. Read it with load_case"):
        load_nested(tmp_path / "case.onnx")
    with pytest.raises(ForeignFileError, match=r"holds 'values', not 'case'\. Read it with load_nested"):
        load_case(tmp_path / "nested.onnx")


def test_a_model_in_memory_does_not_know_its_folder(path):
    model = onnx.load(path, load_external_data=False)
    with pytest.raises(InvalidArgumentError, match=r"in the file 'x\.onnx\.data'.*Pass the path"):
        create_input_tensors_from_onnx_model(model)
    assert torch.equal(create_input_tensors_from_onnx_model(onnx.load(path))["x"], VALUES["x"])


def test_what_onnx_itself_saves_again_is_read(path, tmp_path):
    model = onnx.load(path)
    onnx.save(model, tmp_path / "one.onnx")
    assert torch.equal(load_nested(tmp_path / "one.onnx")["x"], VALUES["x"])
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size > 4000
    assert torch.equal(load_nested(tmp_path / "two.onnx")["x"], VALUES["x"])


def test_something_else_than_a_path_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"takes a path or an onnx\.ModelProto, found the int 3"):
        create_input_tensors_from_onnx_model(3)
