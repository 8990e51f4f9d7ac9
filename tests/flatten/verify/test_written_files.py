"""Files as other exporters and runtimes write them, next to their model: right ones pass, planted faults are found."""

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from transformers import MistralConfig, MistralForCausalLM

from yobx_flatten import Case, export_onnx, export_program, verify_file
from yobx_flatten.__main__ import main
from yobx_flatten.errors import ForeignFileError, InvalidArgumentError, UntrustedFileError
from yobx_flatten.model_folder.pieces.text import Split, decoder_pieces
from yobx_flatten.testing import assert_same_as_model
from yobx_flatten.verify.calls import matched

from .peer_files import WRITTEN, llama, mistral, t5

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


def compared(path, model, x, **more):
    """The report on the file of a module of one input, with the example and seven rows, or other cases."""
    cases = [Case("the example", (x,)), *(Case(name.replace("_", " "), (given,)) for name, given in more.items())]
    report = verify_file(path, model, cases=cases)
    (one,) = report.files.values()
    return one


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


def swapped_layers(proto):
    renamed(proto, {"present.0.key": "present.1.key", "present.1.key": "present.0.key"})


# in the file that this package writes for Mistral; further down the other faults are planted in files of peers
@pytest.mark.parametrize("plant", [swapped_layers, stale_cache, scaled_scores], ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant, right, model, tmp_path):
    proto = copied(right)
    plant(proto)
    report = verdict(proto, model, tmp_path)
    assert report.ok is False, str(report)
    assert all(case.error is None or "expected" in case.error for case in report.files["model.onnx"].report.cases)


NAMES = {
    "tuples": lambda layer, kind: (f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"),
    "flat": lambda layer, kind: (f"past_{2 * layer + kind}", f"present_{2 * layer + kind}"),
    "torch": lambda layer, kind: (f"past_key_values_{KINDS[kind]}_{layer}", f"out_{KINDS[kind]}_{layer}"),
}
KINDS = ("key", "value")


@pytest.mark.parametrize("convention", NAMES)
def test_conventions_of_names_are_known(convention, right, model, tmp_path):
    names = {}
    for layer, kind in itertools.product(range(2), range(2)):
        given, returned = NAMES[convention](layer, kind)
        names |= {f"past_key_values.{layer}.{KINDS[kind]}": given, f"present.{layer}.{KINDS[kind]}": returned}
    report = verdict(renamed(copied(right), names), model, tmp_path)
    assert report.ok is True, str(report)
    cases = {case.case for case in report.files["model.onnx"].report.cases}
    assert cases >= {"the example", "batch 4, past 19, new 1, 9 padded", "empty cache, new 3"}


def test_a_file_of_encoder_and_decoder_has_the_tokens_of_both_and_its_outputs_are_not_taken_for_a_cache():
    """A call of an encoder and a decoder without a cache returns the scores, and what the encoder returned."""
    names = ["input_ids", "attention_mask", "decoder_input_ids"]
    for given in (names, names[::-1]):
        assert matched(names, given, given, {}, by_order=False) == dict(zip(names, names, strict=True))
    alone = ["input_ids"]
    assert matched(["decoder_input_ids"], alone, alone, {}, by_order=False) == {"decoder_input_ids": "input_ids"}
    leaves = ["logits", *(f"present.0.decoder.{kind}" for kind in KINDS), "encoder_last_hidden_state"]
    found = matched(["linear_9", "layer_norm_2"], leaves, leaves, {}, by_order=True)
    assert found == {"linear_9": "logits", "layer_norm_2": "encoder_last_hidden_state"}
    every = [f"output_{place}" for place in range(4)]
    assert matched(every, leaves, leaves, {}, by_order=True) == dict(zip(every, leaves, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*TracerWarning")
@pytest.mark.parametrize("name", ["half.onnx", "half.xml", "float.xml"])
def test_files_of_torch_and_openvino_are_judged_by_the_precision_of_their_weights(name, tmp_path):
    (linear, x), path = small_linear(), tmp_path / name
    if path.suffix == ".onnx":
        torch.onnx.export(copy.deepcopy(linear).half(), (x.half(),), path, verbose=False)
    else:
        openvino = pytest.importorskip("openvino")
        converted = openvino.convert_model(linear, example_input=x)
        openvino.save_model(converted, path, compress_to_fp16=path.stem == "half")
    more = {} if path.suffix == ".onnx" else {"seven_rows": torch.randn(7, 3)}
    one = compared(path, linear, x, **more)
    assert one.ok is True, str(one)
    assert [case.case for case in one.report.cases] == ["the example", *["seven rows"] * len(more)]
    assert one.report.tolerance == (6e-2 if path.stem == "half" else 1e-4)
    with torch.no_grad():
        linear[0].weight[1, 1] += 0.02
    assert compared(path, linear, x, **more).ok is False


def test_unknown_names_need_a_mapping(right, model, tmp_path):
    proto = renamed(copied(right), {"input_ids": "words"})
    report = verdict(proto, model, tmp_path)
    assert report.ok is None
    assert "words" in report.files["model.onnx"].why_not
    assert verdict(proto, model, tmp_path, names={"words": "input_ids"}).ok is True
    with pytest.raises(InvalidArgumentError, match="names, --map: cannot map a name in the file to tokens"):
        verdict(proto, model, tmp_path, names={"words": "tokens"})
    with pytest.raises(InvalidArgumentError, match=r"has an input or output named wrods\. Their names are .*words"):
        verdict(proto, model, tmp_path, names={"wrods": "input_ids"})


def test_a_file_that_runs_in_no_case_is_not_called_wrong_and_a_damaged_one_leaves_the_others_judged(
    right, model, tmp_path
):
    proto = copied(right)
    nodes = [constant("shape", [7919, -1, 64]), helper.make_node("Reshape", ["unchanged", "shape"], ["logits"])]
    returned_through(proto, "logits", *nodes)
    report = verdict(proto, model, tmp_path)
    assert report.ok is None, str(report)
    (one,) = report.files.values()
    assert "runs in no case" in str(one)
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
    command = ["verify", "--model", str(tmp_path / "mistral")]
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    assert main([*command, str(saved(right, good))]) == 0
    assert "right: with a cache" in capsys.readouterr().out
    proto = copied(right)
    scaled_scores(proto)
    saved(proto, bad)
    assert main([*command, str(bad), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["files"]["model.onnx"]["first_node"]["operator"] == "Mul"
    path = str(saved(renamed(copied(right), {"input_ids": "words"}), bad))
    assert main([*command, path, "--map", "words=input_ids"]) == 0
    for wrong in ([path], [path, "--map", "words"], [path, "--device", "cuda"], [str(tmp_path / "nowhere.onnx")]):
        assert main([*command, *wrong]) == 2
    assert main(["verify", path, "--map", "words=input_ids"]) == 2
    errors = capsys.readouterr().err
    assert "--map works only with --model" in errors
    assert "do not work with --model" in errors
    assert "There is no file and no folder at" in errors


def test_sizes_that_a_file_fixes_are_kept_and_stated(tmp_path):
    linear, x = small_linear()
    torch.onnx.export(linear, (x,), tmp_path / "fixed.onnx", verbose=False)
    one = compared(tmp_path / "fixed.onnx", linear, x, seven_rows=torch.randn(7, 3))
    assert one.ok is True
    assert "the file fixes axis 0 of input at 4" in str(one)
    torch.nn.init.ones_(linear[0].weight)
    with pytest.raises(AssertionError, match="WRONG"):
        assert_same_as_model(tmp_path / "fixed.onnx", linear, cases=[Case("the example", (x,))])


def test_files_of_strangers_run_nothing(tmp_path):
    linear, x = torch.nn.Linear(3, 2).eval(), torch.randn(4, 3)
    torch.export.save(torch.export.export(linear, (x,)), tmp_path / "linear.pt2")
    cases = [Case("the example", (x,))]
    with pytest.raises(UntrustedFileError):
        verify_file(tmp_path / "linear.pt2", linear, cases=cases)
    assert verify_file(tmp_path / "linear.pt2", linear, cases=cases, trust=True).ok is True
    torch.onnx.export(linear, (x,), tmp_path / "linear.onnx", verbose=False)
    proto = onnx.load(tmp_path / "linear.onnx")
    onnx.save(proto, tmp_path / "all.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    outside = onnx.load(tmp_path / "all.onnx", load_external_data=False)
    for entry in (entry for tensor in outside.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = "../w.data"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "linear.onnx").write_bytes(outside.SerializeToString())
    assert verify_file(tmp_path / "folder" / "linear.onnx", linear, cases=cases).ok is None


def changed(model):
    with torch.no_grad():
        next(model.parameters())[5] += 0.2
    return model


def test_files_of_optimum_are_right_and_are_found_in_folders(tmp_path):
    """optimum's encoder, and two decoders in one file; mobius writes one folder for each component, as here."""
    for part in ("encoder_model", "decoder_model_merged"):
        (tmp_path / part).mkdir()
        shutil.copy(WRITTEN / "optimum" / f"{part}.onnx", tmp_path / part / "model.onnx")
    report = verify_file(tmp_path, t5())
    assert sorted(report.files) == ["decoder_model_merged/model.onnx", "encoder_model/model.onnx"]
    assert report.ok is True, str(report)
    merged = report.files["decoder_model_merged/model.onnx"]
    assert merged.report.input_names[-1] == "use_cache_branch"
    assert merged.call == "decoder_model, decoder_with_past_model", "both branches"
    assert len(merged.report.cases) >= 6
    assert [case.steps for case in merged.report.cases] == [1, 1, 1, 3, 3, 3], "a loop over the file's own cache"


def test_a_file_of_genai_is_right_where_it_runs():
    """The builder's attention reads one row where several tokens follow a cache; those cases are errors."""
    (one,) = verify_file(WRITTEN / "genai", llama(), explain=False).files.values()
    assert one.ok is False, "other cases do not run"
    ran = [case for case in one.report.cases if case.error is None]
    assert [case.case for case in ran] == ["batch 3, past 6, new 1", "batch 1, past 9, new 3"], str(one)
    assert all(case.within(one.report.tolerance) and case.steps == 3 for case in ran), str(one)
    assert all("batch_size must be 1" in case.error for case in one.report.failed()), str(one)
    (other,) = verify_file(WRITTEN / "genai", changed(llama()), explain=False).files.values()
    assert not any(case.within(other.report.tolerance) for case in other.report.cases)


def test_a_file_of_openvino_is_compared(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, path = small_mistral(), tmp_path / "model.onnx"
    written(model, path)
    (tmp_path / "openvino").mkdir()
    openvino.save_model(openvino.convert_model(path), tmp_path / "openvino" / "model.xml", compress_to_fp16=False)
    (one,) = verify_file(tmp_path / "openvino", model).files.values()
    assert one.ok is True, str(one)
    assert {case.runtime for case in one.report.cases} == {"openvino"}
    assert verify_file(tmp_path / "openvino", small_mistral(window=None)).ok is False


@pytest.mark.filterwarnings("ignore:.*read_binary:DeprecationWarning")  # its exporter reads files of its own so
@pytest.mark.parametrize("ours", [True, False])
def test_a_file_of_executorch_is_compared_also_one_that_it_wrote_by_itself(ours, tmp_path):
    pytest.importorskip("executorch", reason="ExecuTorch is not installed: make executorch runs this test")
    from executorch.exir import to_edge

    (linear, x), path = small_linear(), tmp_path / "model.pte"
    if ours:
        export_program(linear, (x,), dynamic_shapes=None).to_executorch(path, backend="portable")
        more = {"other_values": torch.randn(4, 3)}
    else:
        path.write_bytes(to_edge(torch.export.export(linear, (x,))).to_executorch().buffer)
        more = {"seven_rows": torch.randn(7, 3)}
    one = compared(path, linear, x, **more)
    assert one.ok is True, str(one)
    assert {case.runtime for case in one.report.cases} == {"executorch"}
    assert ours or "the file fixes axis 0 of input at 4" in str(one)
    torch.nn.init.ones_(linear[0].weight)
    assert compared(path, linear, x, **more).ok is False
    path.write_bytes(b"no program")
    assert ours or "is not a file of ExecuTorch" in str(compared(path, linear, x))


FILES = {
    "optimum/encoder_model": t5,
    "optimum/decoder_model_merged": t5,
    "genai/model": llama,
    "torch/model": llama,
    "mobius/model": llama,
    "transformers/prefill": mistral,
    "transformers/decode": mistral,
}


def with_constant(name, change):
    def plant(proto):
        (held,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
        held.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(held).copy()), name))

    return plant


def larger_epsilon(proto):
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-3


def exchanged_columns(values):
    return values[:, [*range(16, 32), *range(16), *range(32, values.shape[1])]]


FAULTS = {
    "features turned round": ("optimum/encoder_model", lambda proto: wrong_axis(proto, "last_hidden_state", 1)),
    "stale mask": ("optimum/encoder_model", stale_mask),
    "rounded weight": (
        "optimum/decoder_model_merged",
        with_constant("onnx::MatMul_574_merged_0", lambda values: values.round(2)),
    ),
    "stale cache": ("optimum/decoder_model_merged", lambda proto: stale_cache(proto, "present.0.decoder.value")),
    "permuted head of the cache": ("genai/model", permuted_head),
    "keys for values": (
        "genai/model",
        lambda proto: renamed(proto, {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}),
    ),
    "positions off by one": ("genai/model", with_constant("cos_cache", lambda values: numpy.roll(values, 1, axis=0))),
    "clipped tokens": ("torch/model", lambda proto: clipped_tokens(proto, 30)),
    "first row for all": ("torch/model", lambda proto: first_row_for_all(proto, proto.graph.output[0].name)),
    "stale mask of a decoder": ("torch/model", stale_mask),
    "permuted heads of a weight": (
        "mobius/model",
        with_constant("model.layers.0.self_attn.q_proj.weight_t", exchanged_columns),
    ),
    "larger epsilon": ("mobius/model", larger_epsilon),
    "stale keys": ("mobius/model", lambda proto: stale_cache(proto, "present.0.key")),
    "lost window": ("transformers/prefill", with_constant("val_39", lambda values: values * 1000)),
    "positions of zero": ("transformers/decode", wrong_position),
    "scores turned round": ("transformers/decode", lambda proto: wrong_axis(proto, "logits", 2)),
}


def loaded(file):
    return onnx.load(WRITTEN / f"{file}.onnx")


def wrong_values(proto, file, tmp_path):
    onnx.save(proto, tmp_path / "model.onnx")
    (one,) = verify_file(tmp_path / "model.onnx", FILES[file](), explain=False).files.values()
    assert one.report is not None, str(one)
    ran = [case for case in one.report.cases if case.error is None or "expected shape" in case.error]
    assert ran, str(one)
    return [case.case for case in ran if not case.within(one.report.tolerance)]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_a_peer_is_right(file, tmp_path):
    """Nothing is wrong in what the exporters wrote: a fault that is found below is the planted one."""
    assert wrong_values(loaded(file), file, tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_file_of_a_peer_is_found(fault, tmp_path):
    file, plant = FAULTS[fault]
    proto = loaded(file)
    plant(proto)
    assert wrong_values(proto, file, tmp_path) != []


ACTION = Path(__file__).parents[3] / ".github" / "actions" / "verify" / "action.yml"


def run_action(environment, workspace, **inputs):
    action = pytest.importorskip("yaml").safe_load(ACTION.read_text(encoding="utf-8"))
    assert set(inputs) <= set(action["inputs"])
    given = {name: inputs.get(name, of.get("default", "")) for name, of in action["inputs"].items()}
    assert all(given[name] for name, of in action["inputs"].items() if of.get("required"))
    output = ""
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        named = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
            for name, text in step.get("env", {}).items()
        }
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        here = {"GITHUB_ACTION_PATH": str(ACTION.parent), "PATH": path}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],  # as GitHub runs a step
            env={**outside, **here, **named},
            cwd=workspace,
            capture_output=True,
            text=True,
            check=False,
        )
        output += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, output
    return 0, output


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return place


@pytest.mark.slow
def test_the_action_passes_a_right_file_and_fails_on_a_wrong_one(environment, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(WRITTEN / "torch", tmp_path / "exported")
    assert sys.prefix != str(environment)
    status, output = run_action(environment, tmp_path, path="exported/model.onnx", model="model")
    assert status == 0, output
    assert "right" in output
    model.lm_head.weight.data[5] += 0.2
    model.save_pretrained(tmp_path / "other")
    status, output = run_action(environment, tmp_path, path="exported", model="other")
    assert status == 1, output
    assert "WRONG" in output
    status, output = run_action(
        environment, tmp_path, path="exported", model="model", map="input_ids=input_ids words=ids"
    )
    assert status == 2, output
    assert "no file has an input or output named words" in output
    status, output = run_action(environment, tmp_path, path="exported; touch owned", model="model")
    assert status == 2
    assert not (tmp_path / "owned").exists(), "an input is no part of the program"
