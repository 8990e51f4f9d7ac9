"""Files as other exporters write them: right ones pass, and each planted fault is found."""

import copy
import json

import numpy
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from transformers import MistralConfig, MistralForCausalLM

from yobx_flatten import Case, export_onnx
from yobx_flatten.__main__ import main
from yobx_flatten.errors import ForeignFileError, InvalidArgumentError, UntrustedFileError
from yobx_flatten.model_folder.pieces.text import Split, decoder_pieces
from yobx_flatten.testing import assert_same_as_model
from yobx_flatten.verify import verify_file
from yobx_flatten.verify.calls import matched

WINDOW = 8


def small_mistral(window=WINDOW):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(**sizes, **heads, sliding_window=window, initializer_range=0.3)
    return MistralForCausalLM(config).eval()


def small_linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()).eval(), torch.randn(4, 3)


@pytest.fixture(scope="module")
def model():
    return small_mistral()


def written(model, path):
    (piece,) = decoder_pieces(model, Split(whole_cache=True, proof="none"))
    export_onnx(piece.module, kwargs=piece.kwargs, path=path, proof="none")
    proto = onnx.load(path)
    proto.ClearField("metadata_props")  # which others do not write
    return proto


@pytest.fixture(scope="module")
def right(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("right") / "model.onnx")


def saved(proto, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


def verdict(proto, model, tmp_path, **options):
    return verify_file(saved(proto, tmp_path), model, explain=False, **options)


def copied(proto):
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    return made


def renamed(proto, names):
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return proto


def read_through(proto, name, *nodes):
    for node in proto.graph.node:
        node.input[:] = ["changed" if given == name else given for given in node.input]
    for place, node in enumerate(nodes):
        proto.graph.node.insert(place, node)


def returned_through(proto, name, *nodes):
    for node in proto.graph.node:
        node.input[:] = ["unchanged" if given == name else given for given in node.input]
        node.output[:] = ["unchanged" if made == name else made for made in node.output]
    proto.graph.node.extend(nodes)


def constant(name, values, dtype=numpy.int64):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(numpy.array(values, dtype)))


def swapped_layers(proto):
    renamed(proto, {"present.0.key": "present.1.key", "present.1.key": "present.0.key"})


def permuted_head(proto):
    gather = helper.make_node("Gather", ["past_key_values.0.key", "order"], ["changed"], axis=1)
    read_through(proto, "past_key_values.0.key", constant("order", [1, 0]), gather)


def stale_mask(proto):
    nodes = [constant("zero", 0), constant("one", 1), helper.make_node("Mul", ["attention_mask", "zero"], ["none"])]
    read_through(proto, "attention_mask", *nodes, helper.make_node("Add", ["none", "one"], ["changed"]))


def wrong_position(proto):
    nodes = [constant("zero", 0), helper.make_node("Mul", ["position_ids", "zero"], ["changed"])]
    read_through(proto, "position_ids", *nodes)


def first_row_for_all(proto, name="logits"):
    nodes = [constant("first", [0]), helper.make_node("Gather", ["unchanged", "first"], ["row"], axis=0)]
    nodes += [helper.make_node("Shape", ["unchanged"], ["shape"]), helper.make_node("Expand", ["row", "shape"], [name])]
    returned_through(proto, name, *nodes)


def wrong_axis(proto, name="logits", axis=1):
    ends = {"begin": -1, "end": -(2**31), "axis": axis, "step": -1}
    slice_ = helper.make_node("Slice", ["unchanged", *ends], [name])
    returned_through(proto, name, *(constant(one, [value]) for one, value in ends.items()), slice_)


def stale_cache(proto, name="present.1.value"):
    nodes = [constant(one, [value]) for one, value in {"begin": 0, "end": -1, "first": 1, "axis": 2}.items()]
    nodes += [helper.make_node("Slice", ["unchanged", "begin", "end", "axis"], ["older"])]
    nodes += [helper.make_node("Slice", ["unchanged", "begin", "first", "axis"], ["oldest"])]
    returned_through(proto, name, *nodes, helper.make_node("Concat", ["oldest", "older"], [name], axis=2))


def clipped_tokens(proto, most=40):
    nodes = [constant("most", most), helper.make_node("Min", ["input_ids", "most"], ["changed"])]
    read_through(proto, "input_ids", *nodes)


def scaled_scores(proto):
    nodes = [constant("scale", 1.01, numpy.float32), helper.make_node("Mul", ["unchanged", "scale"], ["logits"])]
    returned_through(proto, "logits", *nodes)


# in the file that this package writes for Mistral; `test_peer_faults` plants the other faults in files of peers
@pytest.mark.parametrize("plant", [swapped_layers, stale_cache, scaled_scores], ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant, right, model, tmp_path):
    proto = copied(right)
    plant(proto)
    report = verdict(proto, model, tmp_path)
    assert report.ok is False, str(report)
    assert all(case.error is None or "expected" in case.error for case in report.files["model.onnx"].report.cases)


def test_a_lost_window_is_found(model, tmp_path):
    proto = written(small_mistral(window=None), tmp_path / "all.onnx")
    report = verdict(proto, model, tmp_path).files["model.onnx"].report
    wrong = {case.case: case.error for case in report.failed()}
    assert wrong["batch 4, past 19, new 1, 9 padded"] is None, "it runs, and returns other numbers"


NAMES = {
    "tuples": lambda layer, kind: (
        f"past_key_values.{layer}.{kind == 'value':d}",
        f"present.{layer}.{kind == 'value':d}",
    ),
    "flat": lambda layer, kind: (f"past_{2 * layer + (kind == 'value')}", f"present_{2 * layer + (kind == 'value')}"),
    "torch": lambda layer, kind: (f"past_key_values_{kind}_{layer}", f"out_{kind}_{layer}"),
}


@pytest.mark.parametrize("convention", NAMES)
def test_conventions_of_names_are_known(convention, right, model, tmp_path):
    names = {}
    for layer in range(2):
        for kind in ("key", "value"):
            given, returned = NAMES[convention](layer, kind)
            names |= {f"past_key_values.{layer}.{kind}": given, f"present.{layer}.{kind}": returned}
    report = verdict(renamed(copied(right), names), model, tmp_path)
    assert report.ok is True, str(report)
    assert {"the example", "batch 4, past 19, new 1, 9 padded", "empty cache, new 3"} <= {
        case.case for case in report.files["model.onnx"].report.cases
    }


@pytest.mark.parametrize("turned", [1, -1])
def test_a_file_of_encoder_and_decoder_has_the_tokens_of_both(turned):
    names = ["input_ids", "attention_mask", "decoder_input_ids"]
    assert matched(names, names[::turned], names[::turned], {}, by_order=False) == dict(zip(names, names, strict=True))
    alone = ["input_ids"]
    assert matched(["decoder_input_ids"], alone, alone, {}, by_order=False) == {"decoder_input_ids": "input_ids"}


def test_outputs_without_names_are_not_taken_for_a_cache():
    """A call of an encoder and a decoder without a cache returns the scores, and what the encoder returned."""
    leaves = ["logits", *(f"present.0.decoder.{kind}" for kind in ("key", "value")), "encoder_last_hidden_state"]
    found = matched(["linear_9", "layer_norm_2"], leaves, leaves, {}, by_order=True)
    assert found == {"linear_9": "logits", "layer_norm_2": "encoder_last_hidden_state"}
    every = [f"output_{place}" for place in range(4)]
    assert matched(every, leaves, leaves, {}, by_order=True) == dict(zip(every, leaves, strict=True))


def test_weights_in_half_precision_are_judged_as_such(tmp_path):
    linear, x = small_linear()
    half = copy.deepcopy(linear).half()
    torch.onnx.export(half, (x.half(),), tmp_path / "half.onnx", verbose=False)
    cases = [Case("the example", (x,))]
    (one,) = verify_file(tmp_path / "half.onnx", linear, cases=cases).files.values()
    assert one.ok is True, str(one)
    assert one.report.tolerance == 6e-2
    with torch.no_grad():
        linear[0].weight[1, 1] += 0.02
    assert verify_file(tmp_path / "half.onnx", linear, cases=cases).ok is False


def test_unknown_names_need_a_mapping(right, model, tmp_path):
    proto = renamed(copied(right), {"input_ids": "words"})
    report = verdict(proto, model, tmp_path)
    assert report.ok is None
    assert "words" in report.files["model.onnx"].why_not
    assert verdict(proto, model, tmp_path, names={"words": "input_ids"}).ok is True
    with pytest.raises(InvalidArgumentError, match="maps a name to tokens"):
        verdict(proto, model, tmp_path, names={"words": "tokens"})
    with pytest.raises(InvalidArgumentError, match=r"no file has an input or output wrods\. There are .*words"):
        verdict(proto, model, tmp_path, names={"wrods": "input_ids"})


def test_a_file_that_runs_in_no_case_is_not_called_wrong(right, model, tmp_path):
    proto = copied(right)
    nodes = [constant("shape", [7919, -1, 64]), helper.make_node("Reshape", ["unchanged", "shape"], ["logits"])]
    returned_through(proto, "logits", *nodes)
    report = verdict(proto, model, tmp_path)
    assert report.ok is None, str(report)
    (one,) = report.files.values()
    assert "runs in no case" in str(one)


def test_a_damaged_file_leaves_the_others_of_its_folder_judged(right, model, tmp_path):
    onnx.save(right, tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes((tmp_path / "a.onnx").read_bytes()[:1000])
    found = verify_file(tmp_path, model).files
    assert found["a.onnx"].ok is True
    assert found["b.onnx"].ok is None
    assert "b.onnx is damaged" in str(found["b.onnx"])
    with pytest.raises(ForeignFileError, match=r"b\.onnx is damaged"):
        verify_file(tmp_path / "b.onnx", model)


def test_quantized_files_are_judged_by_tokens(right, model, tmp_path):
    how = {"op_types_to_quantize": ["MatMul"]}  # it takes the Attention of ONNX for the one of com.microsoft
    quantize_dynamic(saved(right, tmp_path), tmp_path / "int8.onnx", per_channel=True, **how)
    (one,) = verify_file(tmp_path / "int8.onnx", model, explain=False).files.values()
    assert one.report is not None, str(one)
    assert one.report.quality.weights == "int8"
    assert one.report.quality.agreement > 0.5
    proto = onnx.load(tmp_path / "int8.onnx")
    wrong_axis(proto)
    assert verdict(proto, model, tmp_path).ok is False


def test_the_command_states_its_verdict_and_the_first_node(right, model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "mistral")
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    path = saved(right, good)
    assert main(["verify", str(path), "--model", str(tmp_path / "mistral")]) == 0
    assert "right: with a cache" in capsys.readouterr().out
    proto = copied(right)
    scaled_scores(proto)
    path = saved(proto, bad)
    assert main(["verify", str(bad), "--model", str(tmp_path / "mistral"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["files"]["model.onnx"]["first_node"]["operator"] == "Mul"
    path = saved(renamed(copied(right), {"input_ids": "words"}), bad)
    assert main(["verify", str(path), "--model", str(tmp_path / "mistral")]) == 2
    assert main(["verify", str(path), "--model", str(tmp_path / "mistral"), "--map", "words=input_ids"]) == 0
    assert main(["verify", str(path), "--model", str(tmp_path / "mistral"), "--map", "words"]) == 2
    assert main(["verify", str(path), "--map", "words=input_ids"]) == 2
    assert main(["verify", str(path), "--model", str(tmp_path / "mistral"), "--device", "cuda"]) == 2
    assert main(["verify", str(tmp_path / "nowhere.onnx"), "--model", str(tmp_path / "mistral")]) == 2
    errors = capsys.readouterr().err
    assert "--map works only with --model" in errors
    assert "do not work with --model" in errors
    assert "There is no file and no folder at" in errors


def test_sizes_that_a_file_fixes_are_kept_and_stated(tmp_path):
    linear, x = small_linear()
    torch.onnx.export(linear, (x,), tmp_path / "fixed.onnx", verbose=False)
    cases = [Case("the example", (x,)), Case("seven rows", (torch.randn(7, 3),))]
    (one,) = verify_file(tmp_path / "fixed.onnx", linear, cases=cases).files.values()
    assert one.ok is True
    assert "the file fixes axis 0 of input at 4" in str(one)
    torch.nn.init.ones_(linear[0].weight)
    with pytest.raises(AssertionError, match="WRONG"):
        assert_same_as_model(tmp_path / "fixed.onnx", linear, cases=cases)


def test_files_of_strangers_run_nothing(tmp_path):
    linear = torch.nn.Linear(3, 2).eval()
    x = torch.randn(4, 3)
    cases = [Case("the example", (x,))]
    torch.export.save(torch.export.export(linear, (x,)), tmp_path / "linear.pt2")
    with pytest.raises(UntrustedFileError):
        verify_file(tmp_path / "linear.pt2", linear, cases=cases)
    assert verify_file(tmp_path / "linear.pt2", linear, cases=cases, trust=True).ok is True
    (tmp_path / "folder").mkdir()
    torch.onnx.export(linear, (x,), tmp_path / "folder" / "linear.onnx", verbose=False)
    proto = onnx.load(tmp_path / "folder" / "linear.onnx")
    onnx.save(proto, tmp_path / "all.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    outside = onnx.load(tmp_path / "all.onnx", load_external_data=False)
    for tensor in outside.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../w.data"
    (tmp_path / "folder" / "linear.onnx").write_bytes(outside.SerializeToString())
    assert verify_file(tmp_path / "folder" / "linear.onnx", linear, cases=cases).ok is None
