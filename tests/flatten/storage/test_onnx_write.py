"""What stands in the file, and that nothing half-written stands anywhere."""

import json
import os

import onnx
import pytest
import torch

from yobx_flatten import InvalidArgumentError, create_onnx_model_from_input_tensors, load_nested, save_nested


def test_outputs_are_named_by_the_way_to_them(tmp_path):
    save_nested(tmp_path / "x.onnx", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), "c": [1, None, "x"]})
    model = onnx.load(tmp_path / "x.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [output.name for output in model.graph.output] == ["a.b", "a.b#2", "c.0", "c.2"]
    assert list(model.graph.input) == []


def test_the_metadata_name_format_and_version(tmp_path):
    save_nested(tmp_path / "x.onnx", [torch.ones(2)])
    found = {entry.key: entry.value for entry in onnx.load(tmp_path / "x.onnx").metadata_props}
    assert found["yobx_flatten.format"] == "nested-values"
    assert found["yobx_flatten.format_version"] == "1"
    assert found["yobx_flatten.content"] == "values"
    assert json.loads(found["yobx_flatten.structure"])["node"] == "builtins:list"


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


def test_the_second_file_goes_with_the_one_it_belonged_to(tmp_path):
    save_nested(tmp_path / "x.onnx", torch.arange(5000), external_data=True)
    save_nested(tmp_path / "x.onnx", torch.arange(3))
    assert os.listdir(tmp_path) == ["x.onnx"]
    assert load_nested(tmp_path / "x.onnx").tolist() == [0, 1, 2]


def test_a_new_file_leaves_its_neighbours_alone(tmp_path):
    (tmp_path / "x.onnx.data").write_text("mine")
    save_nested(tmp_path / "x.onnx", torch.arange(3))
    assert (tmp_path / "x.onnx.data").read_text() == "mine"


def test_the_folder_is_made(tmp_path):
    save_nested(str(tmp_path / "a" / "b" / "x.onnx"), 3)
    assert load_nested(str(tmp_path / "a" / "b" / "x.onnx")) == 3


def test_what_does_not_fit_into_one_file_is_refused_first(tmp_path):
    large = torch.zeros(1, dtype=torch.uint8).expand(2**31)
    with pytest.raises(InvalidArgumentError, match=r"2\.1 GB do not fit into one ONNX file"):
        save_nested(tmp_path / "x.onnx", large, external_data=False)
    with pytest.raises(InvalidArgumentError, match="use save_nested"):
        create_onnx_model_from_input_tensors(large)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("values", [None, [], {"a": [None, ()]}])
def test_a_file_without_tensors_can_be_run(values, tmp_path):
    """onnxruntime loads no graph without outputs, so there is one of no elements."""
    save_nested(tmp_path / "x.onnx", values)
    assert load_nested(tmp_path / "x.onnx") == values
    runtime = pytest.importorskip("onnxruntime")
    (output,) = runtime.InferenceSession(tmp_path / "x.onnx").run(None, {})
    assert output.shape == (0,)
