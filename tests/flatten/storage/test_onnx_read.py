"""What stands in a file; a damaged, truncated or foreign one is a clear error."""

import json
import os
import zlib

import numpy as np
import onnx
import pytest
import torch

from tests.flatten.storage.storage_values import State
from yobx_flatten import create_onnx_model_from_input_tensors, load_case, load_nested, save_case, save_nested
from yobx_flatten.errors import DamagedFileError, FlattenError, ForeignFileError, InvalidArgumentError
from yobx_flatten.storage import create_input_tensors_from_onnx_model

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
    with pytest.raises(DamagedFileError, match=f"pads strings to {letters} characters, over 1 GB"):
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
    with pytest.raises(FileNotFoundError, match=r"x\.onnx"):
        load_nested(tmp_path / "x.onnx")
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


def test_both_files_may_move_together_and_the_second_is_asked_for_by_name(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for file in (path, path.with_name("x.onnx.data")):
        file.rename(tmp_path / "elsewhere" / file.name)
    moved = tmp_path / "elsewhere" / "x.onnx"
    assert torch.equal(load_nested(moved)["x"], VALUES["x"])
    moved.with_name("x.onnx.data").unlink()
    with pytest.raises(DamagedFileError, match=r"'x' is stored in x\.onnx\.data, which is not there; keep the two"):
        load_nested(moved)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "..", "", "a/b"])
def test_a_file_reads_nothing_but_what_is_beside_it(path, location):
    def change(model):
        initializer(model, "x").external_data[0].value = location

    edit(path, change)
    with pytest.raises(DamagedFileError, match="not a file in the ONNX file's folder"):
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
    with pytest.raises(ForeignFileError, match=r"is of type 'case', not 'values'\. Read it with load_case"):
        load_nested(tmp_path / "case.onnx")
    with pytest.raises(ForeignFileError, match=r"is of type 'values', not 'case'\. Read it with load_nested"):
        load_case(tmp_path / "nested.onnx")


def test_a_model_in_memory_does_not_know_its_folder(path):
    model = onnx.load(path, load_external_data=False)
    with pytest.raises(InvalidArgumentError, match=r"in the file 'x\.onnx\.data'.*Pass the path"):
        create_input_tensors_from_onnx_model(model)
    with pytest.raises(InvalidArgumentError, match=r"takes a path or an onnx\.ModelProto, found the int 3"):
        create_input_tensors_from_onnx_model(3)
    assert torch.equal(create_input_tensors_from_onnx_model(onnx.load(path))["x"], VALUES["x"])


def test_what_onnx_itself_saves_again_is_read(path, tmp_path):
    model = onnx.load(path)
    onnx.save(model, tmp_path / "one.onnx")
    assert torch.equal(load_nested(tmp_path / "one.onnx")["x"], VALUES["x"])
    onnx.save(model, tmp_path / "two.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size > 4000
    assert torch.equal(load_nested(tmp_path / "two.onnx")["x"], VALUES["x"])


def test_outputs_are_named_by_the_way_to_them_and_metadata_name_format_and_version(tmp_path):
    save_nested(
        tmp_path / "x.onnx", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), "c": [1, None, "x"], "\ud800": 1}
    )
    model = onnx.load(tmp_path / "x.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [output.name for output in model.graph.output] == ["a.b", "a.b#2", "c.0", "c.2", "?"]
    assert list(model.graph.input) == []
    found = {entry.key.removeprefix("yobx_flatten."): entry.value for entry in model.metadata_props}
    assert (found["format"], found["format_version"], found["content"]) == ("nested-values", "1", "values")
    assert json.loads(found["structure"])["node"] == "builtins:dict"


@pytest.mark.parametrize(("count", "files"), [(2**20, 1), (5 * 2**20, 2)])
def test_a_second_file_is_written_for_more_than_sixteen_mebibytes(count, files, tmp_path):
    size = save_nested(tmp_path / "x.onnx", torch.zeros(count))
    assert len(list(tmp_path.iterdir())) == files
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0 < size - 4 * count < 2000


def test_data_begin_at_multiples_of_64(tmp_path):
    """So that a program may map them into memory."""
    save_nested(tmp_path / "x.onnx", [torch.zeros(1025, dtype=torch.uint8) for _ in range(3)], external_data=True)
    model = onnx.load(tmp_path / "x.onnx", load_external_data=False)
    places = [{e.key: e.value for e in tensor.external_data} for tensor in model.graph.initializer]
    assert [place["offset"] for place in places] == ["0", "1088", "2176"]
    assert {place["location"] for place in places} == {"x.onnx.data"}


def broken(tensor):

    def detach():
        raise RuntimeError("broken")

    tensor.detach = detach
    return tensor


def test_an_error_half_way_leaves_what_was_there(tmp_path):
    save_nested(tmp_path / "x.onnx", torch.arange(5000), external_data=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    values = [torch.ones(5000), broken(torch.ones(5000))]
    with pytest.raises(RuntimeError, match="broken"):
        save_nested(tmp_path / "x.onnx", values, external_data=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_second_file_goes_with_the_one_it_belonged_to_and_neighbours_stay(tmp_path):
    path = tmp_path / "made" / "x.onnx"
    save_nested(str(path), torch.arange(5000), external_data=True)
    save_nested(path, torch.arange(3))
    assert os.listdir(path.parent) == ["x.onnx"]
    assert load_nested(str(path)).tolist() == [0, 1, 2]
    path.unlink()
    path.with_name("x.onnx.data").write_text("mine")
    save_nested(path, torch.arange(3))
    assert path.with_name("x.onnx.data").read_text() == "mine"


def test_what_does_not_fit_into_one_file_is_refused_first(tmp_path):
    large = torch.zeros(1, dtype=torch.uint8).expand(2**31)
    with pytest.raises(InvalidArgumentError, match=r"2\.1 GB exceed the 2 GB limit of ONNX files"):
        save_nested(tmp_path / "x.onnx", large, external_data=False)
    with pytest.raises(InvalidArgumentError, match="Use save_nested"):
        create_onnx_model_from_input_tensors(large)
    assert os.listdir(tmp_path) == []


def test_a_file_without_tensors_can_be_run(tmp_path):
    """onnxruntime loads no graph without outputs, so there is one of no elements."""
    runtime = pytest.importorskip("onnxruntime")
    for values in (None, [], {"a": [None, ()]}):
        save_nested(tmp_path / "x.onnx", values)
        assert load_nested(tmp_path / "x.onnx") == values
        (output,) = runtime.InferenceSession(tmp_path / "x.onnx").run(None, {})
        assert output.shape == (0,)
