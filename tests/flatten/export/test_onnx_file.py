"""The file of an export: names of its axes, its graph, its lines of code, and when it takes its name."""

from __future__ import annotations

import importlib
import io
import pathlib
import re
import sys
import sysconfig

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxscript import optimizer, rewriter
from torch.export import Dim

from tests.cases import cases
from tests.flatten.export.exported_files import exported_file
from tests.models import make_model
from tests.modules import module_class, module_of
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, register_flattening_functions
from yobx_flatten.errors import DynamicShapesError, InvalidArgumentError, ReplayError
from yobx_flatten.export import Case, export_onnx, export_program
from yobx_flatten.export.onnx.rewrite.graph import (
    _RuleOfOperator,
    copy_type,
    input_of,
    insert_before,
    optimize_graph,
    type_of,
)
from yobx_flatten.export.traced import _WithoutGraphs

pytestmark = pytest.mark.slow
Drifts = module_class("Drifts", lambda self, x: x + (0.0 if torch.compiler.is_exporting() else 0.5))
Twice = module_class("Twice", lambda self, x: {"y": x * 2})


def _run(path, **feeds):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([given.name for given in session.get_outputs()], session.run(None, feeds), strict=True))


def test_a_file_that_failed_does_not_replace_one_that_did_not(tmp_path, monkeypatch):
    path = tmp_path / "a.onnx"
    path.write_bytes(b"the old one")
    with pytest.raises(ReplayError, match=r'(?s)Nothing was written to .*a\.onnx\. To look .* keep_failed="a folder"'):
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, cases=[])

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(ir, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, cases=[])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.onnx"]
    assert path.read_bytes() == b"the old one"


def test_a_file_that_failed_is_kept_where_it_is_asked_for(tmp_path):
    path, failed = tmp_path / "a.onnx", tmp_path / "failed"
    with pytest.raises(InvalidArgumentError, match=r"keep_failed=.* is the folder of the file itself"):
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, keep_failed=tmp_path)
    with pytest.raises(ReplayError, match=r"The file that failed is .*failed.a\.onnx") as caught:
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, cases=[], keep_failed=failed)
    assert caught.value.report.max_difference == 0.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["failed"]
    assert _run(failed / "a.onnx", x=torch.ones(2, 3).numpy())["output"].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("refers", "left"), [(True, ["a.onnx"]), (False, ["a.onnx", "a.onnx.data"])])
def test_weights_beside_an_older_file_go_with_it(refers, left, tmp_path):
    path = tmp_path / "a.onnx"
    export_onnx(torch.nn.Linear(64, 64), (torch.ones(2, 64),), path=path, cases=[])
    if refers:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="a.onnx.data", size_threshold=0)
    else:
        (tmp_path / "a.onnx.data").write_text("mine")
    assert (tmp_path / "a.onnx.data").is_file()
    export_onnx(Twice(), (torch.ones(2, 3),), path=path, cases=[])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    assert _run(path, x=torch.ones(2, 3).numpy())["y"].tolist() == [[2.0] * 3] * 2


def test_outputs_may_be_called_like_nodes_and_parameters(tmp_path):
    """An ONNX graph has one namespace for all values (https://github.com/pytorch/pytorch/issues/165758)."""

    def named(self, x):
        return {"sigmoid": torch.relu(x).sigmoid(), "relu": x.tanh() + self.weight, "weight": x * self.weight}

    module, x = (
        module_of(named, weight=torch.tensor([1.0, -2.0, 3.0])),
        torch.tensor([[-1.0, 0.5, 2.0], [1.0, -3.0, 0.0]]),
    )
    export_onnx(module, (x,), path=tmp_path / "named.onnx", cases=[])
    onnx.checker.check_model(tmp_path / "named.onnx")
    found = {name: torch.from_numpy(value) for name, value in _run(tmp_path / "named.onnx", x=x.numpy()).items()}
    expected = {name: value.detach() for name, value in module(x).items()}
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("opset", cases([20, 23], quick=[20]))
def test_a_decode_call_of_several_rows_holds_in_every_opset(opset, tmp_path):
    """In 23 the exporter makes RotaryEmbedding of cosines with one row, which onnxruntime refuses for two."""
    model, path = make_model("llama"), tmp_path / "a.onnx"
    exported = export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=path, opset_version=opset)
    assert exported.report.max_difference < 1e-4
    model_file = onnx.load(path)
    assert [entry.version for entry in model_file.opset_import if entry.domain == ""] == [opset]
    onnx.checker.check_model(model_file)


@pytest.mark.parametrize("opset", [17, "18", 18.0, True])
def test_an_opset_below_the_first_of_the_exporter_is_refused_before_the_trace(opset, tmp_path, caplog, capfd):
    """torch would write another one, and log tracebacks of its converters."""

    def untraceable(self, x):
        raise AssertionError("traced")

    with pytest.raises(InvalidArgumentError, match="opset_version: expected None or an int of 18 or more"):
        export_onnx(module_of(untraceable), (torch.ones(2, 4),), path=tmp_path / "a.onnx", opset_version=opset)
    assert list(tmp_path.iterdir()) == []
    assert [record.name for record in caplog.records if "onnx" in record.name] == []
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_type_without_kernels_is_an_error_that_says_so_and_half_precision_is_compared_as_such(tmp_path):
    """https://github.com/pytorch/pytorch/issues/143643; the file can be kept for another provider."""
    module, x, failed = torch.nn.Linear(3, 4).bfloat16(), torch.ones(2, 3, dtype=torch.bfloat16), tmp_path / "failed"
    with pytest.raises(ReplayError, match=r"(?s)onnxruntime lacks kernels for bfloat16 on the CPU.*failed.a\.onnx"):
        export_onnx(module, (x,), path=tmp_path / "a.onnx", cases=[], keep_failed=failed)
    assert not (tmp_path / "a.onnx").exists()
    assert onnx.load(failed / "a.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    half = torch.nn.Linear(3, 4).half(), (torch.ones(2, 3).half(),)
    assert export_onnx(*half, path=tmp_path / "a.onnx", cases=[]).report.tolerance == 6e-2
    assert export_onnx(Twice(), (torch.ones(2, 3),), path=tmp_path / "b.onnx", cases=[]).report.tolerance == 1e-4


def test_complex_numbers_are_pairs_in_the_file_and_8_bit_floats_go_in_and_come_out(tmp_path):
    """onnxruntime has no complex numbers, NumPy no such floats (https://github.com/pytorch/pytorch/issues/106877)."""
    turn = module_class("Turn", lambda self, z: {"turned": z * 1j, "size": z.abs()})()
    z = torch.tensor([[1 + 2j, 3j], [-1.0, 2 - 2j]])
    report = export_onnx(turn, (z,), path=tmp_path / "a.onnx", cases=[]).report
    assert report.cases[-1].differences.keys() == {"turned", "size"}
    found = _run(tmp_path / "a.onnx", z=torch.view_as_real(z).numpy())
    assert found["turned"][0].tolist() == [[-2.0, 1.0], [-3.0, 0.0]]
    assert found["size"][0, 1] == 3.0

    def forward(self, x):
        return {"wide": x.to(torch.float32) * 3, "narrow": (x.to(torch.float32) * 3).to(torch.float8_e5m2)}

    x = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 7.0]]).to(torch.float8_e4m3fn)
    cast = module_class("Cast", forward)()
    report = export_onnx(cast, (x,), path=tmp_path / "a.onnx", cases=[], opset_version=20).report
    assert [case.runtime for case in report.cases] == ["torch.export", "onnxruntime"]
    assert report.cases[-1].differences == {"wide": 0.0, "narrow": 0.0}


def _axes(path):
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_decoders_have_the_names_that_tools_know():
    axes = _axes(exported_file("llama").path)
    assert axes["input_ids"] == ["batch_size", "sequence_length"]
    assert axes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert axes["past_key_values.0.key"] == ["batch_size", 2, "past_sequence_length", 8]
    assert axes["past_key_values.1.value"] == ["batch_size", 2, "past_sequence_length", 8]
    assert axes["logits"] == ["batch_size", "kept_sequence_length", 96]
    assert axes["present.1.key"] == ["batch_size", 2, "total_sequence_length", 8]
    # layers that slide keep less than was seen: one name for both lengths would be wrong
    axes = _axes(exported_file("gemma2").path)
    assert axes["past_key_values.0.key"][2] == "past_window_length"
    assert axes["past_key_values.1.key"][2] == "past_sequence_length"
    assert axes["present.0.key"][2] == "Min(7, past_window_length + sequence_length)"
    assert axes["present.1.key"][2] == "total_sequence_length"
    axes = _axes(exported_file("t5").path)
    assert axes["decoder_input_ids"] == ["batch_size", "decoder_sequence_length"]
    assert axes["attention_mask"] == ["batch_size", "encoder_sequence_length"]
    assert axes["past_key_values.0.decoder.key"][2] == "past_decoder_sequence_length"
    assert axes["past_key_values.0.encoder.key"][2] == axes["attention_mask"][1]  # they are equal
    assert axes["present.0.decoder.key"][2] == "past_decoder_sequence_length + decoder_sequence_length"


def test_without_a_cache_the_mask_is_as_long_as_the_tokens(tmp_path):
    ids = torch.randint(3, 90, (2, 4))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    export_onnx(make_model("llama"), kwargs=kwargs, path=tmp_path / "a.onnx", cases=[])
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == axes["attention_mask"] == ["batch_size", "sequence_length"]


PICTURES = {"pixel_values": torch.rand(3, 3, 8, 8)}
PAIR = {"input_ids": torch.ones(2, 5).long(), **PICTURES}


@pytest.mark.parametrize(
    ("forward", "kwargs", "texts", "pictures"),
    [
        (
            lambda self, input_ids, pixel_values: (
                input_ids.float().mean(1)[:, None] - pixel_values.mean((1, 2, 3))[None]
            ),
            PAIR,
            "texts",
            "images",
        ),
        (
            lambda self, input_ids, pixel_values: (input_ids.float().mean(1), pixel_values.mean((1, 2, 3))),
            PAIR,
            "batch_size",
            "images",
        ),
        (lambda self, pixel_values: pixel_values.mean((1, 2, 3)), PICTURES, "batch_size", "batch_size"),
    ],
    ids=["each text with each picture", "pictures in a prompt", "pictures alone"],
)
def test_pictures_have_a_name_of_their_own_where_there_are_texts(tmp_path, forward, kwargs, texts, pictures):
    """As in CLIP, where each text is compared with each picture; their axis was `s99`."""
    export_onnx(module_class("Model", forward)(), kwargs=kwargs, path=tmp_path / "a.onnx", cases=[])
    axes = _axes(tmp_path / "a.onnx")
    assert axes["pixel_values"][0] == pictures
    outputs = [names for name, names in axes.items() if name not in kwargs]
    assert outputs[-1][-1] == pictures
    assert outputs[0][0] == axes.get("input_ids", [texts])[0] == texts


def _prompted(self, input_ids, attention_mask, decoder_input_ids):
    """Weigh each of all tokens by its distance to the end, in parts that onnxruntime gives memory of their own."""
    new = torch.arange(input_ids.shape[1]).float()
    whole = torch.arange(attention_mask.shape[1]).float()
    read = (input_ids * new.sin()).sum(1, keepdim=True)
    return (attention_mask * whole.sin()).sum(1, keepdim=True) + read * decoder_input_ids


def test_axes_of_two_sizes_have_two_names(tmp_path):
    """A prompt after others, and a canvas: onnxruntime gives axes of one name memory of one size."""

    def inputs(rows, new, whole, canvas):
        ids, mask = torch.ones(rows, new), torch.ones(rows, whole)
        decoded = torch.arange(float(rows * canvas)).reshape(rows, canvas)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoded}

    module, other = module_class("Prompted", _prompted)(), Case("other", (), inputs(3, 4, 9, 2))
    assert export_onnx(module, kwargs=inputs(2, 3, 8, 6), path=tmp_path / "a.onnx", cases=[other]).report.ok
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == ["batch_size", "encoder_sequence_length"]
    assert axes["attention_mask"][0] == "batch_size"
    assert axes["attention_mask"][1] not in {"encoder_sequence_length", "decoder_sequence_length"}


@pytest.mark.parametrize("spell", [str, Dim], ids=["texts", "Dim"])
def test_names_of_the_user_come_first(spell, tmp_path):
    model = make_model("llama")
    inputs = decode_inputs(model, DecodeSizes())
    shapes = dynamic_shapes(inputs, {"input_ids": {0: spell("rows"), 1: spell("new")}})
    export_onnx(model, kwargs=inputs, path=tmp_path / "a.onnx", dynamic_shapes=shapes, cases=[], steps=1)
    axes = _axes(tmp_path / "a.onnx")
    assert axes["input_ids"] == ["rows", "new"]
    assert axes["attention_mask"] == ["rows", "total_sequence_length"]
    assert axes["present.0.key"] == ["rows", 2, "total_sequence_length", 8]


Scale = module_class("Scale", lambda self, x, y: {"z": x.sum(1) + y})


def test_names_are_kept_for_any_module_and_one_for_two_sizes_is_refused(tmp_path):
    args = (torch.ones(2, 3), torch.ones(2))
    shapes = {"x": {0: "rows", 1: "columns"}, "y": {0: "rows"}}
    cases = [Case("other sizes", (torch.ones(5, 7), torch.ones(5)))]
    export_onnx(Scale(), args, path=tmp_path / "a.onnx", dynamic_shapes=shapes, cases=cases)
    assert _axes(tmp_path / "a.onnx") == {"x": ["rows", "columns"], "y": ["rows"], "z": ["rows"]}
    with pytest.raises(ReplayError, match="other sizes"):
        export_program(Scale(), args, dynamic_shapes={"x": {0: "rows"}, "y": {0: "rows"}}, cases=cases)
    with pytest.raises(DynamicShapesError, match=r"x: axis 1 is called 'rows' and has size 3, .* size 2"):
        export_program(Scale(), args, dynamic_shapes={**shapes, "x": {0: "rows", 1: "rows"}}, cases=[])


def test_helpers_of_graphs_name_what_is_missing():
    """A guess of a type would be written to the file."""
    first, bare = ir.val("first", ir.DataType.FLOAT16, [2]), ir.Value(name="bare")
    last = ir.node("Add", [first, None], name="sum")
    assert input_of(last, 0) is first
    with pytest.raises(ValueError, match="the Add node sum has no input 1"):
        input_of(last, 1)
    assert type_of(first) == ir.DataType.FLOAT16
    with pytest.raises(ValueError, match="the dtype of the ONNX value bare is not known"):
        type_of(bare)
    copy_type(first, bare)
    assert first.dtype == ir.DataType.FLOAT16
    graph = ir.Graph([first], last.outputs, nodes=[last])
    insert_before(last, [ir.node("Abs", [first], name="abs"), ir.node("Exp", [first], name="exp")])
    assert [node.name for node in graph] == ["abs", "exp", "sum"]
    with pytest.raises(ValueError, match="the Abs node alone does not belong to a graph"):
        insert_before(ir.node("Abs", [first], name="alone"), [])


def _convolutions(self, x):
    x = self.norm(self.one(torch.nn.functional.pad(x, (1, 1, 1, 1))))
    x = torch.relu(torch.relu(x)).clamp(0, 6).clamp(1, 5)
    return self.two(x).transpose(1, 2).transpose(2, 1).to(torch.float64).to(torch.float32)


def _both_optimized(module, args, kwargs, shapes):
    """Return the size of the graph, and what we and what onnxscript make of it."""
    program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    made = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False).model
    found = []
    for optimize in (optimize_graph, optimizer.optimize_ir):
        copy = ir.serde.deserialize_model(ir.serde.serialize_model(made))
        optimize(copy)
        found.append(ir.serde.serialize_model(copy))
    return len(made.graph), *found


def test_the_graph_is_the_one_of_onnxscript():
    model = make_model("mistral")
    with register_flattening_functions(patch_transformers=True):
        inputs = decode_inputs(model, DecodeSizes())
        _, ours, theirs = _both_optimized(model, (), inputs, dynamic_shapes(inputs))
    assert ours == theirs
    parts = {"one": torch.nn.Conv2d(3, 4, 3), "norm": torch.nn.BatchNorm2d(4), "two": torch.nn.Conv2d(4, 4, 3)}
    size, ours, theirs = _both_optimized(module_of(_convolutions, **parts), (torch.ones(2, 3, 8, 8),), {}, None)
    assert ours == theirs
    assert len(ours.graph.node) < size


def test_a_rule_is_not_tried_at_other_operators():
    rule = next(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name == "CastCast")
    node = ir.node("Relu", [ir.Value(name="x")])
    assert _RuleOfOperator(rule).try_rewrite(None, None, node) is None  # without a model, the rule itself would raise
    assert {_RuleOfOperator(rule)._operator for rule in rewriter._DEFAULT_REWRITE_RULES} >= {"Cast", "Slice", "Conv"}


CODE = """
import torch

class Scaled(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, (x,))
"""


def test_files_name_no_folder_of_their_author_and_keep_the_numbers_of_lines(tmp_path, monkeypatch):
    pack = tmp_path / "private" / "pack"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text("")
    (pack / "model.py").write_text(CODE)
    monkeypatch.setattr(torch.fx.config, "do_not_emit_stack_traces", False)  # other tests have no use for them
    monkeypatch.syspath_prepend(str(pack.parent))
    module, example = importlib.import_module("pack.model").Scaled(), {"x": torch.ones(3, 4)}
    export_program(module, kwargs=example, cases=[]).save(tmp_path / "model.pt2")
    export_onnx(module, kwargs=example, cases=[], path=tmp_path / "model.onnx")
    for name in ("model.pt2", "model.onnx"):
        data = (tmp_path / name).read_bytes()
        private = [str(tmp_path), str(pathlib.Path.home()), sysconfig.get_paths()["purelib"]]
        assert [one for one in private if one.encode() in data] == [], name
        assert re.search(rb'pack/model\.py\\?", line 6', data), name
    for name in ("pack", "pack.model"):
        sys.modules.pop(name)


def test_what_hides_graphs_may_outlive_the_stream():
    """Python 3.13 closes a stream that is collected, which flushes it."""
    stream = io.StringIO()
    hides = _WithoutGraphs(stream)
    hides.write("def forward(self, x):\n")
    hides.write("a line\n")
    assert stream.getvalue() == "a line\n"
    stream.close()
    hides.close()
    assert hides.closed
