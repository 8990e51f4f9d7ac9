"""Wrong inputs, as a newcomer passes them: the message names what is wrong, and the line that it prints works."""

import os
import re

import numpy
import pytest
import torch
import transformers
from torch.nn.functional import mse_loss

from roundpipe_runtime import DeviceError, RoundPipe, RoundPipeError, RoundPipeRunConfig
from roundpipe_runtime.__main__ import main as roundpipe
from tests.modules import module_class, module_of
from yobx_flatten import export_folder, functions_from_fields, open_generator, open_model, record_calls, verify_folder
from yobx_flatten.__main__ import main as flatten
from yobx_flatten.declare import register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import DynamicShapesError, FlattenError, InvalidArgumentError
from yobx_flatten.export import export_onnx, export_program
from yobx_flatten.model_folder.source import configuration

Doubles = module_class("Doubles", lambda self, x: x * 2)
Adds = module_class("Adds", lambda self, x, y: x + y)


X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("hello\n" * 90, encoding="utf-8")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: export_onnx(Doubles(), (X,), path="empty"), r"Name a file: path='empty.model\.onnx'"),
        (lambda: export_onnx(Doubles, (X,), path="m.onnx"), r"Make an instance: Doubles\("),
        (lambda: export_onnx(Doubles(), X, path="m.onnx"), r"args: expected a tuple"),
        (lambda: export_onnx(Doubles(), (numpy.ones(2),), path="m.onnx"), r"torch\.from_numpy\(x\)"),
        (lambda: export_onnx("llama", (X,), path="m.onnx"), r"the str 'llama'.*\n    export_folder\('llama', "),
        (lambda: export_program(Doubles(), kwargs={"x": X.to_sparse()}), r"is a sparse tensor.*\n    x\.to_dense\(\)"),
        (lambda: export_program(Doubles(), (X,), tolerance=-1), "tolerance must be None or a number of 0 or more"),
        (lambda: export_program(torch.nn.Linear(4, 4), (X,)), r"Linear\.forward fails .*shapes cannot be multiplied"),
        (lambda: export_onnx(Adds(), (X, X[:, :2]), path="m.onnx"), "Adds itself fails.*must match the size"),
        (lambda: open_model(None), r"expected the path of an exported folder, found None"),
        (lambda: open_generator(Doubles()), r"found .*Doubles.*\n    export_folder\(model"),
        (lambda: verify_folder(3), "found the int 3"),
        (lambda: export_folder(Doubles(), "out"), r"takes a Hugging Face model.*\n    export_onnx\(module"),
        (lambda: export_folder(Doubles, "out"), "or its folder or name; found .*Doubles"),
        (lambda: export_folder(transformers.LlamaForCausalLM, "out"), r"LlamaForCausalLM\.from_pretrained\(FOLDER\)"),
        (lambda: export_folder("out", Doubles()), r"folder: expected a path.*\n    export_folder\(model, FOLDER\)"),
        (lambda: export_folder(None, "out"), "takes a Hugging Face model, or its folder or name; found None"),
        (lambda: export_folder(transformers.LlamaConfig(), "out"), "found the LlamaConfig"),
        (lambda: export_folder("llama", "out", batch="2"), "batch must be None or an int of 1 or more, found '2'"),
        (lambda: export_folder("llama", "out", dtype="float"), "dtype must be one of float32"),
        (lambda: export_folder("llama", "out", task="text-genration"), "Did you mean 'text-generation'"),
        (lambda: open_generator("nowhere"), "There is no folder nowhere"),
        (lambda: open_model("a.txt"), r"a\.txt is a file\. Name the folder"),
        (lambda: verify_folder("a.txt"), r"a\.txt is a file\. Name the folder"),
        (lambda: record_calls(Doubles(), to="a.txt").__enter__(), "a file, but calls are written to a folder"),
    ],
)
def test_a_wrong_argument_is_refused_by_an_error_of_the_package(call, words):
    with pytest.raises(FlattenError, match=f"(?s){words}"):
        call()
    assert sorted(os.listdir()) == ["a.txt", "empty"]


def test_a_program_refuses_arguments_of_another_kind():
    """torch printed two specs of trees, or a missing attribute; the line of the message is what works."""
    program = export_program(Doubles(), (X,))
    for given, words in [
        (([[1.0, 2.0, 3.0]],), r"x: expected T1s2x3 .*found the list.*\n    torch\.tensor\(x\)"),
        (([X, [X]],), r"x: expected T1s2x3 .*found the list .*\.$"),
        (([[1], [2, 3]],), r"found the list \[\[1\], \[2, 3\]\]\.$"),
        ((None,), "x: expected T1s2x3 .*found None"),
        ((), "x is missing.*arguments of the export: x"),
    ]:
        with pytest.raises(InvalidArgumentError, match=f"(?s){words}"):
            program(*given)
    assert torch.equal(program(torch.tensor([[1.0, 2.0, 3.0]] * 4)), torch.tensor([[2.0, 4.0, 6.0]] * 4))


WRONG_SETTINGS = [
    ({"max_new_token": 3}, "refuses this call: .*Did you mean 'max_new_tokens'"),
    ({"num_beam": 2}, "refuses this call: .*Did you mean 'num_beams'"),
    ({"bad_words_ids": [[100_000]]}, r"refuses this call: .*vocabulary size is .*100000"),
    ({"sequence_bias": {(100_000,): 1.0}}, r"refuses this call: .*vocabulary size is .*100000"),
    ({"num_beams": 0}, "num_beams.* the int 0"),
    ({"max_new_tokens": "3"}, "max_new_tokens.* the str '3'"),
    ({"eos_token_id": "</s>"}, "one of its arguments .*eos_token_id: the str '</s>'"),
    ({"forced_eos_token_id": 100_000}, "one of its arguments .*out of bounds.*forced_eos_token_id: the int 100000"),
    ({"streamer": True}, "one of its arguments .*streamer: the bool True"),
    ({"logits_processor": torch.sigmoid}, "one of its arguments .*logits_processor"),
]


@pytest.mark.slow
def test_tokens_of_another_kind_are_converted_by_the_line_of_the_message():
    export_folder("llama", "out", to="program", proof="none", dtype=torch.float32)
    lists = ([[5, 6, 7]], [5, 6, 7], numpy.array([[5, 6, 7]]), numpy.array([5, 6, 7]))
    tensors = (torch.tensor([5, 6, 7]), torch.tensor([[5.0, 6.0, 7.0]]))
    inputs = transformers.BatchEncoding({"input_ids": torch.tensor([[5, 6, 7]])})
    for opened in (open_generator("out", trust=True), open_model("out", trust=True)):
        wanted = opened.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
        for input_ids in (*lists, *tensors):
            with pytest.raises(InvalidArgumentError, match=r"input_ids must be integers of shape.*\n") as refused:
                opened.generate(input_ids, max_new_tokens=3)
            line = str(refused.value).splitlines()[-1].strip().removeprefix("input_ids = ")
            found = opened.generate(eval(line, {"torch": torch, "input_ids": input_ids}), max_new_tokens=3)
            assert torch.equal(found, wanted)
        with pytest.raises(InvalidArgumentError, match=r"\n    generate\(\*\*inputs\)"):
            opened.generate(inputs)
        assert torch.equal(opened.generate(**inputs, max_new_tokens=3), wanted)
        with pytest.raises(InvalidArgumentError, match=r"Read a text with the tokenizer"):
            opened.generate("hello")
        for wrong, words in WRONG_SETTINGS:
            with pytest.raises(InvalidArgumentError, match=words):
                opened.generate(torch.tensor([[5, 6, 7]]), **{"max_new_tokens": 3, **wrong})
        with pytest.raises(ZeroDivisionError):  # of the caller's own function
            opened.generate(wanted[:, :3], max_new_tokens=3, prefix_allowed_tokens_fn=lambda row, ids: 1 // 0)
    for change in (opened.resize_token_embeddings, opened.set_input_embeddings):
        with pytest.raises(InvalidArgumentError, match=r"cannot change\.(?s:.)*\n    export_folder\(model, folder\)"):
            change(300)
    with pytest.raises(InvalidArgumentError, match="generation_config must be a GenerationConfig, found the dict"):
        opened.generate(torch.tensor([[5, 6, 7]]), generation_config={"max_new_tokens": 3})
    for named in ({"input_ids": [[5, 6]]}, {"input_ids": inputs.input_ids, "attention_mask": [[1, 1, 1]]}):
        with pytest.raises(InvalidArgumentError, match="Make a tensor of it"):
            opened(**named)


Reads = module_class("Reads", lambda self, x, extra: (x * 2, extra[0]["a"] * 3))


@pytest.mark.parametrize(
    "export", [export_program, lambda *given, **named: export_onnx(*given, **named, path="m.onnx")]
)
def test_an_input_of_several_tensors_without_an_entry_is_named_and_the_line_of_the_message_is_taken(export):
    """torch alone states that structures differ; after None, which it refuses there, the sizes are the example's."""
    inputs = {"x": torch.ones(2, 3), "extra": ({"a": torch.ones(2, 3)},)}
    with pytest.raises(DynamicShapesError, match=r"Missing: \['extra'\]") as refused:
        export(Reads(), kwargs=inputs, dynamic_shapes={"x": {0: "rows"}})
    line = str(refused.value).splitlines()[-1].strip()
    exported = export(Reads(), kwargs=inputs, dynamic_shapes={"x": {0: "rows"}, **eval(f"{{{line}}}")})
    assert torch.equal(exported(x=torch.full((7, 3), 2.0), extra=inputs["extra"])[0], torch.full((7, 3), 4.0))
    with pytest.raises((FlattenError, AssertionError, RuntimeError)):
        exported(x=torch.ones(7, 3), extra=({"a": torch.ones(5, 3)},))


def _choose(self, x):
    return torch.cond(x.sum() > 0, self.one, self.other, (x,))


def test_the_functions_of_a_class_in_another_order_name_the_line_that_takes_them():
    class Box:
        def __init__(self, w, n):
            self.w, self.n = w, n

    functions = functions_from_fields(Box, ["w"], ["n"])
    with pytest.raises(FlattenError, match=r"\n    register_class_flattening\(.*Box, functions\)"):
        register_class_flattening(Box, *functions)
    register_class_flattening(Box, functions)
    unregister_class_flattening(Box)


def test_near_names_of_types_alone_are_proposed_and_a_good_export_prints_no_log_of_torch(caplog):
    """Sizes that the module refuses are tried, of which torch logs twenty lines; a value that decides has one line."""
    for name in ("newcomer", "my-model", "checkpoint", "nosuchmodel"):
        with pytest.raises(InvalidArgumentError) as refused:
            export_folder(name, "out")
        assert "Did you mean" not in str(refused.value)
    chooses = module_of(_choose, one=torch.nn.Linear(5, 4), other=torch.nn.Linear(5, 4))
    assert export_program(chooses, (torch.ones(2, 5),)).report.ok
    assert not [record.name for record in caplog.records if record.name.startswith("torch")]


LAYERS = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]


def test_a_device_that_is_not_there_names_one_that_is():
    with pytest.raises(DeviceError, match=r"'cuda:0' was asked for.*no accelerator.*Use 'virtual:2'") as refused:
        RoundPipe(torch.nn.Sequential(*LAYERS), devices="cuda:0")
    devices = re.search(r"Use '(.*)'", str(refused.value))[1]
    config = RoundPipeRunConfig(loss_reduction="mean")
    pipeline = RoundPipe(torch.nn.Sequential(*LAYERS), devices=devices, model_run_config=config)
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    found = pipeline.forward_backward((x,), label=y, loss_fn=mse_loss)
    torch.testing.assert_close(found.detach(), mse_loss(torch.nn.Sequential(*LAYERS)(x), y).detach())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["verify", "a.txt"], "yobx-flatten verify a.txt --model MODEL"),
        (["chat", "nowhere"], "There is no folder nowhere. To export one: yobx-flatten export MODEL -o nowhere"),
        (["generate", "a.txt", "--prompt", "x"], "a.txt is a file. Name the folder"),
        (["export", "lama", "-o", "out"], "Did you mean llama"),
        (["export", r"C:\model", "-o", "out"], r"There is no folder C:\model. Name a"),
        (["export", "empty", "-o", "out"], "contains no config.json: it is not a folder that save_pretrained wrote"),
        (["export", "llama", "-o", "a.txt"], "a.txt is a file. Name a folder that is new or empty"),
        (["exprot", "llama"], "Did you mean 'export'"),
        (["train", "llama", "-o", "out"], "Name a text (--text FILE) or conversations (--chat FILE)."),
        (["train", "llama", "--text", "nowhere.txt", "-o", "out"], "There is no file nowhere.txt"),
        (["train", "a.txt", "--text", "a.txt", "-o", "out"], "Name a folder that save_pretrained wrote"),
        (["train", "llama", "--text", "empty", "-o", "out"], "empty contains no text"),
        (["train", "llama", "--text", "a.txt", "-o", "a.txt"], "a.txt exists"),
        (["plan", "llama", "--memory", "lots"], "--memory 24GiB"),
        (["trian", "llama"], "Did you mean 'train'"),
        (["train", "llama", "--text", "a.txt", "-o", "out", "--learning-rate", "1"], "Did you mean --lr?"),
        (["train", "llama", "--text", "a.txt", "-o", "out", "--batch_size", "9"], "Did you mean --batch?"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(command, words, capsys):
    assert (roundpipe if command[0] in ("train", "plan", "trian") else flatten)(command) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert (shown.count("\n"), sorted(os.listdir())) == (1, ["a.txt", "empty"])


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (torch.nn.MSELoss, r"Pass MSELoss\(\)"),  # which would take the outputs for options
        ("mse", "found 'mse'"),
        (3, "found 3. Pass no loss_fn if the outputs are"),
        (lambda out, label: mse_loss(out, label).detach(), "nothing would be trained"),
        (lambda out, label: torch.tensor(mse_loss(out, label).item()), "nothing would be trained"),
        (lambda out, label: (out - label - 9).long().sum(), "nothing would be trained"),
        (lambda out, label: mse_loss(out, label) * 1j, "is complex"),
    ],
)
def test_a_loss_that_is_no_function_or_trains_nothing_is_refused(loss_fn, words):
    """`backward` of torch refuses each of them, too."""
    model = torch.nn.Linear(3, 3)
    with pytest.raises((RuntimeError, TypeError, AttributeError)):
        loss_fn(model(X), X).backward()
    pipeline = RoundPipe(model, devices="virtual:2")
    with pytest.raises(RoundPipeError, match=words):
        pipeline.forward_backward((X,), label=X, loss_fn=loss_fn)
    pipeline.close()


def interrupted_import(*_arguments, **_options):
    """What transformers makes of Ctrl-C while it imports a model, in a class body of torch."""
    inner = RuntimeError("Error calling __set_name__")
    inner.__cause__ = KeyboardInterrupt()
    raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'.") from inner


@pytest.mark.parametrize(
    ("main", "command", "program"),
    [
        (flatten, ["export", "llama", "-o", "out"], "yobx-flatten"),
        (flatten, ["check", "llama"], "yobx-flatten"),
        (roundpipe, ["plan", "llama"], "roundpipe"),
        (roundpipe, ["train", "llama", "--text", "a.txt", "-o", "out"], "roundpipe"),
    ],
)
def test_ctrl_c_that_a_library_renames_is_an_interruption(main, command, program, monkeypatch, capsys):
    """It was an error of the model with status 2, two seconds after the start."""
    monkeypatch.setattr(configuration, "_shrunk", interrupted_import)
    assert main(command) == 130
    assert capsys.readouterr().err.endswith(f"{program}: interrupted, nothing was written\n")
