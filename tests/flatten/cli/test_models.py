"""`export`, `verify`, `generate`, `chat`, `explain` and `check` from end to end, and with all that may go wrong."""

import errno
import io
import json
import shutil
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer

from tests import fresh_process
from tests.flatten.model_folder.exported_folders import exported, saved
from tests.modules import module_class
from yobx_flatten import ExportReport, OnnxForCausalLM, RecordedCalls, make_dynamic_cache, record_calls, save_nested
from yobx_flatten.__main__ import main
from yobx_flatten.cli import folder_commands
from yobx_flatten.core.files import scratch
from yobx_flatten.errors import GenerationError, InvalidArgumentError
from yobx_flatten.model_folder import stored_cases, write
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.runners.program_runner import ProgramRunner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder():
    return exported("mistral")[1]


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def test_a_saved_model_becomes_a_folder_that_is_verified_and_generates(tmp_path, capsys):
    _, source = saved("gpt2")
    out = tmp_path / "out"
    assert main(["export", str(source), "-o", str(out), "--logits", "last"]) == 0
    shown = capsys.readouterr()
    assert "0 tokens differ" in shown.out
    assert "converting GPT2LMHeadModel to ONNX" in shown.err
    names = {path.name for path in out.iterdir()}
    assert {"model.onnx", "config.json", "generation_config.json", "tokenizer_config.json", "genai_config.json"} < names
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    shapes = {value.name: value.type.tensor_type.shape for value in onnx.load(out / "model.onnx").graph.output}
    assert shapes["logits"].dim[1].dim_value == 1
    assert main(["verify", str(out)]) == 0
    assert "ok   generate" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "Hello", "--prompt", "Hi", "--tokens", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["prompt"] for row in rows] == ["Hello", "Hi"]
    given = ByT5Tokenizer(extra_ids=0, padding_side="left")(["Hello", "Hi"], padding=True, return_tensors="pt")
    searched = saved("gpt2")[0].generate(**given, max_new_tokens=4, num_beams=3, do_sample=False)
    command = ["generate", str(out), "--prompt", "Hello", "--prompt", "Hi", "--tokens", "4", "--beams", "3", "--json"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    texts = ByT5Tokenizer(extra_ids=0).batch_decode(
        searched[:, given["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert [row["text"] for row in rows] == texts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "There is no folder ./nowhere"),
        (["llama", "--task", "poetry"], "There is no task 'poetry'"),
        (["llama", "--task", "fill-mask"], "is for text-generation, not for fill-mask"),
        (["llama", "--dtype", "bfloat16"], "Use float32 or float16, or to='program'"),
        (["llama", "--target", "executorch", "--max-length", "8"], "length=8 is too small"),
        (["bert", "--logits", "last"], 'logits="last" is for text-generation, and a BertForMaskedLM is for fill-mask'),
        (["llama", "--perplexity-ratio", "1.2"], "Add --quantize int8 or --quantize int4"),
    ],
)
def test_an_export_that_cannot_be_leaves_nothing(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments, "-o", "out"]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_quantised_folder_states_its_quality(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--quantize", "int4", "--perplexity-ratio", "1.3", "--optimize", "onnxruntime", "--json"]
    assert main(["export", "llama", "-o", str(out), *arguments]) == 0
    assert json.loads((out / "yobx_flatten.json").read_text(encoding="utf-8"))["cache"] == "shared"
    quality = json.loads(capsys.readouterr().out)["files"]["model.onnx"]["quality"]
    assert (quality["weights"], quality["ok"], quality["allowed"]) == ("int4", True, 1.3)
    assert quality["perplexity_ratio"] == quality["perplexity"] / quality["model_perplexity"]
    assert main(["verify", str(out)]) == 0
    assert "int4, blocks of 32: max difference" in capsys.readouterr().out


def test_every_way_to_name_a_model_is_known_here_too(tmp_path, capsys, monkeypatch):
    model, source = saved("llama")
    bare = tmp_path / "bare"
    model.config.save_pretrained(bare)
    for name in (bare, bare / "config.json"):
        found = find_model(str(name))
        assert str(found) == f"{name}: a configuration with random weights"
        weights = found.load().get_input_embeddings().weight
        assert weights.shape == model.get_input_embeddings().weight.shape
        assert main(["check", str(name)]) == 0
        shown = capsys.readouterr()
        assert shown.out == "model: nothing found\n"
        assert "with random weights" in shown.err
    assert str(find_model("llama")) == "llama: a small model with random weights"
    found = find_model(str(source))
    assert (str(found), found.has_weights) == (str(source), True)
    assert torch.equal(found.load().get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_an_export_says_that_weights_are_random(tmp_path, monkeypatch, capsys):
    done = SimpleNamespace(path=tmp_path / "out", task="fill-mask", reports={}, verified=SimpleNamespace(checks=()))
    monkeypatch.setattr(folder_commands, "export_folder", lambda *args, **kwargs: done)
    assert main(["export", "llama", "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("llama: a small model with random weights\n")
    assert main(["export", "llama", "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["random_weights"] is True
    assert main(["export", str(saved("llama")[1]), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["random_weights"] is False


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("[Errno -2] Name or service not known"), "the hub cannot be reached ([Errno -2] Name or serv"),
        (ValueError("401 Client Error.\nmore"), "the Hugging Face hub does not provide it: 401 Client Error"),
    ],
)
def test_a_model_of_the_hub_that_does_not_come_is_one_line(error, words, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    def refused(*args, **kwargs):
        if isinstance(error, ConnectionError):
            raise RuntimeError("wrapped") from error
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    assert main(["check", "no-one/nothing"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("yobx-flatten: There is no folder no-one/nothing, and " + words)
    assert shown.count("\n") == 1


def test_a_damaged_model_is_named(tmp_path, capsys):
    _, source = saved("llama")
    copy = shutil.copytree(source, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert main(["export", str(copy), "-o", str(tmp_path / "out")]) == 2
    assert f"{copy}/model.safetensors is damaged" in capsys.readouterr().err
    (copy / "config.json").write_text("{", encoding="utf-8")
    assert main(["export", str(copy), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    """Typer itself ends a command with no message. Files are copied instead of exported."""

    def copy(model, piece, path, *how):
        shutil.copy(folder / path.name, path)
        return ExportReport(path.name)

    monkeypatch.setattr(write, "export_piece", copy)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(write.stored_cases, "store_generation", interrupted)
    assert main(["export", "mistral", "-o", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "yobx-flatten: interrupted, nothing was written"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", ["a file in the way", "a disk that is read-only"])
def test_a_folder_that_cannot_be_written_is_named_before_the_model_is_loaded(reason, tmp_path, monkeypatch, capsys):
    """The folder that was asked for, not the hidden one beside it."""
    monkeypatch.setattr(folder_commands.find, "find_model", lambda *args, **kwargs: pytest.fail("loaded"))
    if reason == "a file in the way":
        (tmp_path / "taken").touch()
        out, words = tmp_path / "taken" / "sub" / "out", "it cannot be written: taken is not a folder"
    else:

        def refused(**options):
            raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".trial-x"))

        monkeypatch.setattr(scratch.tempfile, "mkdtemp", refused)
        out, words = tmp_path / "out", "it cannot be written: Read-only file system"
    assert main(["export", "llama", "-o", str(out)]) == 2
    assert capsys.readouterr().err == f"yobx-flatten: {out}: {words}\n"


def test_a_file_that_differs_is_status_1_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    """The tokens of the model are changed before they are stored: the files do not generate them."""
    original = stored_cases.generation_case

    def other(*args):
        case = original(*args)
        case.outputs["sequences"][:, -1] += 1
        return case

    monkeypatch.setattr(stored_cases, "generation_case", other)
    assert main(["export", "llama", "-o", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert "differs from the model" in shown
    assert "FAIL generate" in shown
    assert list(tmp_path.iterdir()) == []


def test_verify_tells_a_changed_and_a_damaged_file(copied, capsys):
    whole, case = (copied / "model.onnx").read_bytes(), copied / "cases" / "generate.case"
    model = onnx.load_from_string(whole)
    weights = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * 1.5, weights.name))
    onnx.save(model, copied / "model.onnx")
    assert main(["verify", str(copied), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert not any(check["ok"] for check in found["checks"])
    (copied / "model.onnx").write_bytes(whole[:1000])
    assert main(["verify", str(copied)]) == 2
    assert "onnxruntime cannot load" in capsys.readouterr().err.splitlines()[-1]
    (copied / "model.onnx").write_bytes(whole)
    case.write_bytes(case.read_bytes()[:50])
    assert main(["verify", str(copied)]) == 2
    assert "generate.case" in capsys.readouterr().err.splitlines()[-1]
    (copied / "yobx_flatten.json").unlink()
    assert main(["verify", str(copied)]) == 2
    assert "yobx-flatten export did not write it" in capsys.readouterr().err


def test_generate_prints_the_text_that_the_model_writes(folder, capsys):
    model, _ = exported("mistral")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    given = tokenizer("Hello", return_tensors="pt")
    tokens = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    command = ("-m", "yobx_flatten", "generate", folder, "--prompt", "Hello", "--tokens", "12")
    shown = fresh_process.run(*command, imported=fresh_process.TRAINER)
    assert shown.stdout == "Hello" + tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


class Utf8:
    """A tokenizer of bytes as others are: nothing is added, and half a character is shown as a replacement."""

    pad_token, eos_token = None, 0

    def __call__(self, texts, return_tensors, padding):
        rows = [torch.tensor(list(text.encode()), dtype=torch.int64) for text in texts]
        on_the_left = {"batch_first": True, "padding_side": "left"}
        mask = pad_sequence([torch.ones_like(row) for row in rows], **on_the_left)
        return {
            "input_ids": pad_sequence(rows, padding_value=self.pad_token or 0, **on_the_left),
            "attention_mask": mask,
        }

    def decode(self, tokens, skip_special_tokens):
        return bytes(token % 256 for token in tokens.tolist()).decode(errors="replace")


def continued(prompts):
    model, _ = exported("mistral")
    tokenizer = Utf8()
    tokenizer.pad_token = tokenizer.eos_token
    given = tokenizer(prompts, "pt", True)
    made = model.generate(**given, max_new_tokens=12, do_sample=False)[:, given["input_ids"].shape[1] :]
    return [tokenizer.decode(row, True) for row in made]


def test_generate_streams_whole_characters_and_prints_each_of_several_prompts_with_its_text(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(folder_commands.find, "open_tokenizer", lambda folder, **how: Utf8())
    assert main(["generate", str(folder), "--prompt", "Grüße", "--tokens", "12"]) == 0
    (text,) = continued(["Grüße"])
    assert "\N{REPLACEMENT CHARACTER}" in text
    assert capsys.readouterr().out == f"Grüße{text}\n"
    prompts = ["Hello", "A longer prompt"]
    assert main(["generate", str(folder), "--prompt", prompts[0], "--prompt", prompts[1], "--tokens", "12"]) == 0
    pairs = zip(prompts, continued(prompts), strict=True)
    assert capsys.readouterr().out == "".join(f"{prompt!r}\n  {text!r}\n" for prompt, text in pairs)
    assert main(["generate", str(folder), "--prompt", ""]) == 2
    assert "the prompt has no tokens" in capsys.readouterr().err


def test_generate_without_a_tokenizer_says_so(copied, capsys):
    (copied / "tokenizer_config.json").unlink()
    (copied / "config.json").unlink()
    assert main(["generate", str(copied), "--prompt", "Hello"]) == 2
    assert "contains no tokenizer that can be read" in capsys.readouterr().err


def test_explain_names_the_inputs_of_a_model_and_draws_stored_inputs_cases_and_recorded_calls(folder, tmp_path, capsys):
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "past_key_values.1.value: float[" in shown
    assert "past_key_values.length" not in shown
    save_nested(tmp_path / "inputs.onnx", {"x": torch.zeros(2, 3), "flags": [True, None]})
    assert main(["explain", str(tmp_path / "inputs.onnx")]) == 0
    assert "['x']: float32[2, 3]" in capsys.readouterr().out
    assert main(["explain", str(folder / "cases" / "generate.case"), "--json"]) == 0
    assert "['sequences']: int64[3, 49]" in "\n".join(json.loads(capsys.readouterr().out)[0]["lines"])
    (tmp_path / "inputs.onnx").write_text("no model", encoding="utf-8")
    assert main(["explain", str(tmp_path / "inputs.onnx")]) == 2
    assert "inputs.onnx" in capsys.readouterr().err
    (tmp_path / "inputs.onnx").unlink()
    assert main(["explain", str(tmp_path)]) == 2
    assert "contains no .onnx or .pt2 file and no recorded calls" in capsys.readouterr().err
    model = torch.nn.Linear(3, 2)
    with record_calls(model, to=tmp_path / "calls"):
        model(torch.ones(2, 3))
        model(torch.ones(5, 3))
    for target in (tmp_path / "calls", tmp_path / "calls" / "call-00000.safetensors"):
        assert main(["explain", str(target)]) == 0
        assert capsys.readouterr().out == f"{RecordedCalls.load(tmp_path / 'calls')}\n"


Sum = module_class("Sum", lambda self, x, pair, *rest, scale: {"total": (x + pair[0] + pair[1] + sum(rest)) * scale})


def test_explain_names_the_inputs_of_a_program_that_takes_positional_arguments(tmp_path, capsys):
    """By the parameters of `forward`, as in the message of torch; it was refused."""
    x, rows = torch.ones(2, 3), {0: torch.export.Dim.DYNAMIC}
    shapes = {"x": rows, "pair": (rows, rows), "rest": (rows,), "scale": None}
    program = torch.export.export(Sum(), (x, (x, x), x), {"scale": torch.ones(1)}, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "sum.pt2")
    assert main(["explain", str(tmp_path / "sum.pt2"), "--trust"]) == 0
    inputs = "x: float32[?, 3]", "pair.0: float32[?, 3]", "pair.1: float32[?, 3]", "rest_0: float32[?, 3]"
    lines = ["inputs", *(f"  {line}" for line in (*inputs, "scale: float32[1]")), "outputs", "  total"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_program_that_does_not_state_names_is_refused(tmp_path):
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(2, 3),))
    runner = ProgramRunner(program, "linear.pt2")
    program.module_call_graph[0].signature.forward_arg_names = None
    with pytest.raises(GenerationError, match=r"linear.pt2 has positional arguments without names"):
        _ = runner.ports


def test_explain_calls_a_function_of_the_current_folder(tmp_path, monkeypatch, capsys):
    source = (
        "import torch\nfrom yobx_flatten import make_dynamic_cache\n"
        "def make():\n    return {'past': make_dynamic_cache([torch.zeros(1, 2, 3, 4)] * 2)}\n"
        "def call():\n    return torch.nn.Linear(3, 3), (torch.zeros(5),), make()\n"
        "def fail():\n    return 1 / 0\n"
    )
    (tmp_path / "some_inputs_of_mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert make_dynamic_cache  # the library that the block is about is imported
    assert main(["explain", "some_inputs_of_mine:make"]) == 0
    assert "✗" not in capsys.readouterr().out
    assert main(["explain", "some_inputs_of_mine:make", "--plain"]) == 0
    assert "✗" in capsys.readouterr().out
    assert main(["explain", "some_inputs_of_mine:call"]) == 0
    shown = capsys.readouterr().out
    assert "✗" not in shown
    assert "Linear" not in shown
    assert "float32[5]" in shown
    assert "['past']: DynamicCache" in shown
    assert main(["explain", "some_inputs_of_mine:nothing"]) == 2
    assert "some_inputs_of_mine has no nothing" in capsys.readouterr().err
    assert main(["explain", "some_inputs_of_mine:fail"]) == 2
    assert "some_inputs_of_mine:fail() failed: ZeroDivisionError" in capsys.readouterr().err


def test_check_finds_errors_in_a_call(tmp_path, monkeypatch, capsys):
    """No windows: heads of the cache do not vary, and a warning said that there are as many of them as rows."""
    source = (
        "import torch\n"
        "def wrong():\n    return torch.nn.Linear(2, 2), {'inputs': torch.zeros(3, 2)}\n"
        "def other():\n    return 3\n"
    )
    (tmp_path / "some_call_of_mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "some_call_of_mine:wrong", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["some_call_of_mine:wrong"][0]["severity"] == "error"
    assert main(["check", "some_call_of_mine:other"]) == 2
    assert "must return (module, kwargs)" in capsys.readouterr().err
    for model in ("llama", str(saved("mistral")[1])):
        capsys.readouterr()
        assert main(["check", model]) == 0
        assert capsys.readouterr().out == "model: nothing found\n"


TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    model, source = exported("llama")
    folder = shutil.copytree(source, tmp_path_factory.mktemp("chat") / "out")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model, folder, tokenizer


def reply(talks, text, tokens):
    model, _, tokenizer = talks
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_conversation_of_two_turns_or_of_lines_of_the_input_is_that_of_the_model(talks, capsys, monkeypatch):
    _, folder, _ = talks
    asked = ["--system", "S", "--message", "hi", "--message", "yo", "--tokens", "6", "--greedy", "--json"]
    assert main(["chat", str(folder), *asked]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    first = reply(talks, "s:S;u:hi;a:", 6)
    second = reply(talks, f"s:S;u:hi;a:{first};u:yo;a:", 6)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages] == ["S", "hi", first, "yo", second]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nnever read\n"))
    assert main(["chat", str(talks[1]), "--tokens", "5", "--greedy"]) == 0
    assert capsys.readouterr().out == reply(talks, "u:hi;a:", 5) + "\n"
    assert main(["chat", str(exported("llama")[1]), "--message", "hi"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_one_message_is_answered_by_generate_and_in_python(talks, capsys):
    _, folder, _ = talks
    expected = reply(talks, "u:hi;a:", 5)
    assert main(["generate", str(folder), "--chat", "--prompt", "hi", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"prompt": "hi", "text": expected}]
    model = OnnxForCausalLM.from_pretrained(folder)
    assert model.chat([{"role": "user", "content": "hi"}], max_new_tokens=5, do_sample=False) == expected
    with pytest.raises(InvalidArgumentError, match="messages must be a list"):
        model.chat("hi")
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\] is .* without a role"):
        model.chat([{"content": "hi"}])
