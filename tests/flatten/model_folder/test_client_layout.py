"""A folder in the places in which transformers.js looks for files, which other tools and this package also open."""

import json
import os
import shutil
import subprocess

import numpy
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from transformers import ByT5Tokenizer

from tests.flatten.model_folder.exported_folders import lively
from yobx_flatten import GenerationError, InvalidArgumentError, export_folder, open_generator, open_model, verify_folder
from yobx_flatten.generate.settings import located
from yobx_flatten.model_folder.client_layout import apply_layout, check_layout
from yobx_flatten.model_folder.source.configuration import small_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model, root = small_model("llama"), tmp_path_factory.mktemp("layout")
    model.save_pretrained(root / "saved")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(root / "saved")
    export_folder(root / "saved", root / "out", layout="transformers.js")
    return model, root / "out"


@pytest.mark.slow
def test_the_files_are_where_the_client_looks_and_are_verified_and_generate_there(llama):
    model, folder = llama
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*.onnx")] == ["onnx/model.onnx"]
    assert json.loads((folder / "config.json").read_text())["transformers.js_config"] == {"dtype": "fp32"}
    assert "message['content']" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]["filename"] == "onnx/model.onnx"
    assert verify_folder(folder).ok
    ids = torch.randint(4, 258, (1, 6), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    assert open_generator(folder).generate(ids, max_new_tokens=8).tolist() == expected
    assert open_model(folder).generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected


@pytest.mark.slow
def test_two_types_of_one_file_are_not_chosen_between(llama, tmp_path):
    copied = shutil.copytree(llama[1], tmp_path / "copied")
    (copied / "onnx" / "model.onnx").rename(copied / "onnx" / "model_q4.onnx")
    assert located(copied, "model.onnx").name == "model_q4.onnx"
    shutil.copy(copied / "onnx" / "model_q4.onnx", copied / "onnx" / "model_fp16.onnx")
    with pytest.raises(GenerationError, match=r"model_fp16\.onnx, model_q4\.onnx: the same model in several dtypes"):
        open_generator(copied)


def test_weights_in_a_second_file_are_found_under_its_new_name(tmp_path):
    """transformers.js looks for `model_q4.onnx_data`; tensors inside the bodies of nodes are also read from there."""
    weight = numpy_helper.from_array(numpy.arange(2048, dtype=numpy.float32), "weight")
    inner = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [2048])
    constant = helper.make_node("Constant", [], ["inner"], value=numpy_helper.from_array(numpy.ones(2048, "float32")))
    branch = helper.make_graph([constant], "branch", [], [inner])
    nodes = [
        helper.make_node("If", ["x"], ["one"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["one", "weight"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.BOOL, [])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2048])
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=opsets, ir_version=9)
    how = {"location": "model.onnx.data", "size_threshold": 0, "convert_attribute": False}
    onnx.save(model, str(tmp_path / "model.onnx"), save_as_external_data=True, **how)
    (tmp_path / "config.json").write_text("{}")
    assert apply_layout(tmp_path, ["model.onnx"], "int4", "float16") == ["onnx/model_q4f16.onnx"]
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["model_q4f16.onnx", "model_q4f16.onnx_data"]
    stated = json.loads((tmp_path / "config.json").read_text())["transformers.js_config"]
    assert stated == {"dtype": "q4f16", "use_external_data_format": {"model_q4f16.onnx": 1}}
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model_q4f16.onnx")
    assert (session.run(None, {"x": numpy.array(True)})[0] == numpy.arange(1, 2049)).all()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("tree", "onnx", "text-generation", None, "float32"), "layout must be one of 'flat', 'transformers.js'"),
        (("transformers.js", "program", "text-generation", None, "float32"), "is for ONNX files"),
        (("transformers.js", "onnx", "text-to-audio", None, "float32"), "one file for a speech decoder"),
        (("transformers.js", "onnx", "text-generation", "int8", "float16"), "no dtype name for int8 weights of a"),
    ],
)
def test_what_the_client_would_not_open_is_refused(given, why):
    with pytest.raises(InvalidArgumentError, match=why):
        check_layout(*given)


def lively_with_inputs(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = lively(small_model(name))
    if name != "whisper":
        return model, {"input_ids": torch.tensor([[7, 8, 9, 10]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    values = (torch.arange(1600, dtype=torch.float64) ** 2 * 0.37).sin().float()
    return model, {"input_features": values.reshape(1, 16, 100)}


@pytest.mark.slow
@pytest.mark.parametrize("large", [None, 430_000, 1000], ids=["inline", "the first alone is large", "both are large"])
def test_the_joined_decoder_begins_and_goes_on_as_the_model_does(tmp_path, monkeypatch, large):
    if large is not None:  # bytes of weights from which they are next to the file
        monkeypatch.setattr("yobx_flatten.export.onnx.file.LARGE", large)
    model, inputs = lively_with_inputs("t5")
    export_folder(model, tmp_path / "out", layout="transformers.js")
    folder = tmp_path / "out" / "onnx"
    session = onnxruntime.InferenceSession(folder / "decoder_model_merged.onnx")
    with torch.no_grad():
        features = model.get_encoder()(**inputs).last_hidden_state
    given = {
        one.name: numpy.zeros((1, *(size if isinstance(size, int) else 0 for size in one.shape[1:])), numpy.float32)
        for one in session.get_inputs()
        if one.name.startswith("past")
    }
    tokens = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(5):
        given |= {
            "input_ids": tokens[:, -1:].numpy(),
            "encoder_hidden_states": features.numpy(),
            "encoder_attention_mask": inputs["attention_mask"].numpy(),
        }
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(names, given), strict=True))
        with torch.no_grad():
            expected = model(**inputs, decoder_input_ids=tokens).logits[:, -1:]
        torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=1e-4, atol=1e-4)
        given |= {
            name.replace("present", "past_key_values"): value for name, value in found.items() if name != "logits"
        }
        tokens = torch.cat([tokens, expected.argmax(-1)], 1)
    assert verify_folder(tmp_path / "out").ok
    copies = sorted(path.name for path in folder.glob("decoder*data"))  # which all three decoder files read
    assert copies == ([] if large is None else ["decoder_model_merged.onnx_data"])


CLASSES = {"llama": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM", "whisper": "WhisperForConditionalGeneration"}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TRANSFORMERS_JS"), reason="TRANSFORMERS_JS names no transformers.node.mjs")
@pytest.mark.parametrize("name", CLASSES)
def test_transformers_js_writes_the_text_of_the_model(name, tmp_path):
    """In node, with nothing done by hand; TRANSFORMERS_JS is the path of its ``transformers.node.mjs``."""
    model, inputs = lively_with_inputs(name)
    export_folder(model, tmp_path / name, layout="transformers.js")
    (value, *masks) = inputs.values()
    kind, values, cast = "float32", "Float32Array", "Number"
    if masks:
        kind, values, cast = "int64", "BigInt64Array", "BigInt"
    mask = 'attention_mask: new Tensor("int64", [1n, 1n, 1n, 1n], [1, 4]),' if masks else ""
    library = json.dumps(os.path.abspath(os.environ["TRANSFORMERS_JS"]))
    script = tmp_path / "run.mjs"
    script.write_text(
        f"""import {{ {CLASSES[name]}, Tensor, env }} from {library};
env.allowRemoteModels = false; env.localModelPath = {json.dumps(str(tmp_path) + "/")};
const model = await {CLASSES[name]}.from_pretrained({json.dumps(name)});
const data = {values}.from({json.dumps([str(one) for one in value.flatten().tolist()])}.map({cast}));
const inputs = new Tensor({json.dumps(kind)}, data, {json.dumps(list(value.shape))});
const found = await model.generate({{ inputs, {mask} max_new_tokens: 8, do_sample: false }});
console.log(JSON.stringify(found.tolist()[0].map(Number)));
"""
    )
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, check=True)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    assert len(set(expected)) > 3
    assert json.loads(done.stdout.splitlines()[-1])[-8:] == expected[-8:]
