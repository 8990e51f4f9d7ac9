"""`roundpipe train` as a user meets it: folders, texts, what is printed, what is refused, Ctrl-C."""

import json
import os
import re
import shlex
import shutil
import signal

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

import transformers

from roundpipe_runtime import parse_devices
from roundpipe_runtime.__main__ import main
from roundpipe_runtime.cli.train_options import source_of
from roundpipe_runtime.fine_tune import model_source
from tests import fresh_process
from tests.cases import cases
from tests.runtime import tiny_training as tiny
from tests.runtime.tiny_training import same_bits
from yobx_flatten import open_generator
from yobx_flatten.__main__ import main as flatten

pytestmark = pytest.mark.slow

FEW = ["--length", "16", "--batch", "4", "--microbatches", "2", "--steps", "3", "--devices", "virtual:1", "--no-check"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.text_folder(tmp_path / "texts")
    tiny.config_folder(tmp_path / "conf")
    return tmp_path


def digest(folder):
    return model_source(folder).load().state_dict()


def test_a_configuration_becomes_a_model_that_transformers_loads(here, capsys):
    arguments = ["train", "--model", "conf", "--text", "texts", "-o", "out", *FEW, "--lr", "1e-2"]
    assert main([*arguments, "--metrics", "m.jsonl", "--timeline", "t.json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    (name,) = (device.name for device in parse_devices("virtual:1"))
    assert lines[0].startswith("text: ")
    assert re.fullmatch(r"model: conf with random weights, [\d,]+ parameters in float32", lines[1])
    assert lines[2:4] == ["cut: 5 pieces", f"steps: 3 of 4 rows in 2 microbatches on {name}"]
    assert [line.split()[1] for line in lines[4:8]] == ["1/3", "2/3", "3/3", "3/3"]
    assert re.search(
        r"loss \d\.\d{4}  [\d,]+ tokens/s  [\d.]+ [MG]B(, device [\d.]+ [kMG]B)?  lr \d\.\d\de-\d\d  gradient [\d.]+$",
        lines[4],
    )
    assert lines[7].startswith("step 3/3  held-out loss ")
    assert lines[8:] == [
        "saved in out; the saved weights were loaded and compared",
        "step 3:  roundpipe timeline t.json",
    ]
    assert [row[0] for row in tiny.metrics_of(here / "m.jsonl")] == [1, 2, 3, 3]
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    ids = torch.tensor([tokenizer("the pipe", add_special_tokens=False)["input_ids"]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] >= ids.shape[1] + 1
    assert sorted(path.name for path in here.iterdir()) == ["conf", "m.jsonl", "out", "t.json", "texts"]


def test_weights_with_their_tokenizer_go_on_learning(here, capsys):
    """Of JSON lines with a field of their own; the output is as the input was, and has learnt."""
    tiny.weights_folder(here / "model", dtype=torch.bfloat16)
    rows = [json.dumps({"body": tiny.prose(seed=seed)}) for seed in range(3)]
    (here / "docs.jsonl").write_text("\n".join(rows))
    more = ["--text", "docs.jsonl", "--field", "body", "--accumulate", "2", "--schedule", "constant", "--lr", "1e-2"]
    assert main(["train", "--model", "model", *more, "-o", "out", *FEW]) == 0
    assert "steps: 3 of 2 batches of 4 rows" in capsys.readouterr().out
    before, after = digest("model"), digest("out")
    assert before.keys() == after.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert not same_bits(before, after)
    assert transformers.AutoTokenizer.from_pretrained("out")("pipe", add_special_tokens=False)["input_ids"] == [4]


@pytest.mark.parametrize("update", ["in_place", "in_backward"])
def test_an_update_of_the_weights_themselves_saves_the_same_bits(here, update, capsys):
    """The losses and the bfloat16 weights are those of master weights, also after a stop; no other update resumes."""
    tiny.weights_folder(here / "model", dtype=torch.bfloat16)
    common = ["train", "model", "--text", "texts", *FEW, "--lr", "1e-2", "--clip", "0"]
    assert main([*common, "-o", "masters", "--metrics", "masters.jsonl"]) == 0
    assert main([*common, "-o", "out", "--update", update, "--metrics", "m.jsonl", "--every", "2"]) == 0
    assert same_bits(digest("masters"), digest("out"))
    assert tiny.metrics_of(here / "m.jsonl") == tiny.metrics_of(here / "masters.jsonl")
    shutil.rmtree(here / "out-checkpoints" / "checkpoint-3")  # as if the run had been stopped after step 2
    rest = ["--checkpoint", "out-checkpoints", "--resume"]
    assert main([*common, "-o", "resumed", "--update", update, *rest]) == 0
    assert same_bits(digest("masters"), digest("resumed"))
    capsys.readouterr()
    assert main([*common, "-o", "other", *rest]) == 2
    assert f"was trained with --update {update}. Use the same" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_a_type_of_model_is_a_small_one(here, name, capsys):
    """As for the other command line, but with weights as narrow as training wants them."""
    more = ["--dtype", "bfloat16", "--optim-dtype", "same", "--steps", "1"]
    assert main(["train", "--model", name, "texts", "-o", "out", *FEW, *more]) == 0
    assert f"model: {name} with random weights" in capsys.readouterr().out
    assert abs(source_of(name).load().get_input_embeddings().weight.std().item() - 0.02) < 0.005


def test_the_model_is_the_first_argument_as_in_every_command(here, capsys):
    """Text stands behind it; with `--model` all arguments are text. `--json` leaves stdout to one object."""
    assert main(["train", "conf", "texts/*.txt", "-o", "first", *FEW, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "model: conf with random weights" in shown.err
    assert (found["model"], found["random_weights"], found["path"], found["step"]) == ("conf", True, "first", 3)
    assert found["last_step"]["step"] == found["last_evaluation"]["step"] == 3
    spread = [f"texts/{number}.txt" for number in range(3)]
    for name, words in (("named", ["texts/*.txt"]), ("spread", ["--text", *spread])):
        assert main(["train", "-o", name, *FEW, "--model", "conf", *words]) == 0
        assert same_bits(digest("first"), digest(name))


def test_ctrl_c_before_the_first_step_says_that_nothing_was_written(here, capsys, monkeypatch):
    """While weights are drawn: there is no checkpoint to write yet."""
    from roundpipe_runtime.cli import train

    def pressed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_learner", pressed)
    before = sorted(here.rglob("*"))
    assert main(["train", "conf", "texts", "-o", "out", *FEW]) == 130
    assert capsys.readouterr().err == "roundpipe: interrupted, nothing was written\n"
    assert sorted(here.rglob("*")) == before


def test_an_id_of_the_hub_is_downloaded(here, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(here / "conf")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert source_of("someone/model").name == "someone/model"
    assert main(["plan", "someone/model", "--devices", "virtual:1", "--length", "16"]) == 0
    assert asked == [("someone/model", True), ("someone/model", False)]


def test_going_on_after_the_end_with_more_steps(here, capsys, refused):
    """A checkpoint is neither overwritten nor continued unless that is said; one of another model is refused."""
    arguments = ["train", "texts", "-o", "out", *FEW, "--checkpoint", "c", "--schedule", "constant", "--warmup", "0"]
    assert main([*arguments, "--model", "conf"]) == 0
    capsys.readouterr()
    for more, words in (
        (["conf", "--overwrite"], "belongs to another run. Continue that run: --resume; or start"),
        (["gpt2", "--overwrite", "--resume"], "c: The checkpoint is for a different model."),
        (["conf", "--overwrite", "--resume", "--batch", "3"], "c was trained with --batch 4. Use the same"),
    ):
        assert words in refused(*arguments, "--model", *more).err
    longer = [*arguments, "--model", "conf", "--steps", "5"]
    assert main([*longer, "--resume", "--overwrite"]) == 0
    assert "continuing after step 3" in capsys.readouterr().out
    assert main([*longer, "--checkpoint", "d", "--overwrite", "--resume"]) == 0
    assert "no checkpoint in d yet" in capsys.readouterr().out
    whole = digest("out")
    assert main([*longer, "--resume", "--overwrite"]) == 0  # nothing is left to do
    assert same_bits(digest("out"), whole)


MISTAKES = {
    "no model": (["--model", "nowhere/x"], "There is no folder nowhere/x"),
    "no type": (["--model", "lama"], "'lama' is neither a folder nor a type of model that transformers has."),
    "no small one": (["--model", "bit"], "A small bit model cannot be made: "),
    "no config": (["--model", "texts"], "texts contains no config.json"),
    "no text": (["--text", "gone.txt"], "There is no file gone.txt"),
    "nothing": (["--text", "void.txt"], "There is no text in void.txt"),
    "short": (["--text", "short.txt"], "has 6 tokens, which do not fill one row of 16. Give more text"),
    "long": (["--length", "65"], "conf accepts rows of at most 64 tokens. Use: --length 64"),
    "device": (["--devices", "virtual:x"], "--devices virtual:x: it names no device. Write auto, virtual:2, or cuda:0"),
    "cpu": (["--devices", "cpu"], "--devices cpu: it names no device"),
    "memory": (["--memory", "much"], "--memory 'much' is not a size of memory"),
    "too little memory": (["--devices", "virtual:1", "--memory", "1KB"], "memory_limit"),
    "microbatches": (["--microbatches", "5"], "4 rows cannot be split into 5 microbatches. Use a larger batch"),
    "vocabulary": (["--model", "narrow"], "has a vocabulary of 100 tokens, but the byte tokenizer has 259"),
    "output": (["-o", "short.txt/out"], "short.txt/out: it cannot be written: short.txt is not a folder. Name another"),
    "checkpoint": (["--checkpoint", "short.txt/c"], "it cannot be written: short.txt is not a folder"),
    "checkpoint that is a file": (["--checkpoint", "short.txt"], "Name another place: --checkpoint DIR"),
    "checkpoint far below a file": (["--checkpoint", "short.txt/a/b/c"], "short.txt/a/b/c: it cannot be written"),
    "checkpoint beside the output": (["-o", "/proc/out", "--checkpoint", "c"], "/proc/out: it cannot be written"),
    "checkpoint that nothing can be made in": (["--checkpoint", "/proc/self"], "/proc/self: it cannot be written"),
    "metrics in a folder": (["--metrics", "/proc/m.jsonl"], "Name another place: --metrics FILE"),
    "timeline that is a folder": (["--timeline", "texts", "--overwrite"], "texts exists. Name another file"),
    "exists": (["-o", "texts"], "texts exists. Name another folder, or replace it: --overwrite"),
    "metrics": (["--metrics", "short.txt"], "short.txt exists. Name another file, or replace it: --overwrite"),
    "timeline": (["--timeline", "gone/t.json"], "There is no folder gone, so t.json cannot be written"),
    "both": (["--epochs", "2"], "--steps and --epochs both set the length"),
    "lora": (["--lora", "8"], "conf has random weights, on which LoRA adapters are useless"),
    "stay": (["--keep-parameters", "-1"], "--keep-parameters must be a number of GB (0 or more), or auto, found '-1'"),
    "number": (["--batch", "0"], "Invalid value for '--batch'"),
    "schedule": (["--schedule", "stairs"], "'stairs' is not one of"),
    "tokenizer": (["--tokenizer", "texts"], "texts contains no tokenizer"),
    "pack": (["--pack"], "--pack applies to conversations only. Name a file of conversations: --chat FILE"),
    "clip": (["--update", "in_backward"], "Add: --clip 0 --accumulate 1; or use: --update in_place"),
    "accumulate": (["--update", "in_backward", "--clip", "0", "--accumulate", "2"], "Add: --clip 0 --accumulate 1; or"),
    "update on a disk": (["--update", "in_place", "--host", "disk:state"], "Leave --host disk:state out"),
    "update of groups": (["--update", "in_place", "--replicas", "2"], "Remove --replicas 2"),
    "disk of groups": (["--host", "disk:.", "--replicas", "2"], "--host disk:. works only in one process. Leave"),
    "no host": (["--host", "ssd"], "--host must be memory or disk:DIR, found 'ssd'"),
    "plot": (["--plot", "losses.doc"], "losses.doc does not end in .png, .svg or .pdf"),
    "log": (["--report-to", "nowhere"], "--report-to nowhere: nowhere is not supported"),
}
if not torch.accelerator.is_available():
    MISTAKES["accelerator"] = (["--devices", "cuda:0,cuda:1"], "cuda:0,cuda:1: torch finds no accelerator here")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(here, name, refused):
    more, words = MISTAKES[name]
    for file, content in (("void.txt", ""), ("short.txt", "short")):
        (here / file).write_text(content)
    tiny.config_folder(here / "narrow", vocab_size=100)
    before = sorted(here.rglob("*"))
    text = [] if "--text" in more else ["--text", "texts"]
    assert words in refused("train", "--model", "conf", "-o", "out", *text, *FEW, *more).err
    assert sorted(here.rglob("*")) == before


def test_options_may_come_from_a_file(here, capsys):
    (here / "run.yaml").write_text(
        "model: conf\ntext: [texts]\noutput: out\nlength: 16\nbatch: 4\nmicrobatches: 2\nsteps: 9\nlr: 1e-3\n"
        "devices: virtual:1\ncheck: false\neval_share: 0\nwarmup: null\n"
    )
    typed = ["train", "--config", "run.yaml", "--steps", "2"]
    assert main([*typed, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "\nbatch: 4\n" in printed
    assert "\nsteps: 2\n" in printed
    (here / "printed.yaml").write_text(printed)
    assert not (here / "out").exists()
    assert main(typed) == 0
    assert "steps: 2 of 4 rows" in capsys.readouterr().out
    assert main(["train", "--config", "printed.yaml", "-o", "again"]) == 0
    assert same_bits(digest("out"), digest("again"))


def test_the_printed_options_are_all_options(here, capsys):
    """Also where nothing is named yet: a file to begin with. One text is a list; numbers stay as they are."""
    (here / "run.yaml").write_text("model: conf\ntext: texts\noutput: out\nreport-to: tensorboard\ncheck: false\n")
    assert main(["train", "--config", "run.yaml", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{line}\n" in shown for line in ('text: ["texts"]', 'report-to: ["tensorboard"]', "check: false"))
    assert main(["train", "--print-config"]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    missing = {f"--{name}" for name in names if name != "words"} - set(re.findall(r"--[a-z-]+", shown))
    assert not missing
    own = {"--config", "--print-config", "--help", "--no-check"}
    assert set(re.findall(r"--[a-z][a-z-]+", shown)) - {f"--{name}" for name in names} - own <= {"--text", "--output"}


CONFIGS = {
    "no mapping": ("- 1", "--config run.yaml: expected lines like `batch: 4`, found a list"),
    "no YAML": ("a: [", "--config run.yaml is not YAML: while parsing"),
    "an alias": ("text: [&a [x], *a]", "--config run.yaml contains a YAML alias (*name). Write the value itself."),
    "a list in itself": ("text: &a [*a]", "--config run.yaml contains a YAML alias"),
    "a date that is none": ("text: 2020-99-99", "--config run.yaml is not YAML: month must be in 1..12"),
    "a number that is none": ("batch: !!int abc", "--config run.yaml is not YAML: invalid literal"),
    "a number of 5,000 digits": ("batch: " + "9" * 5000, "--config run.yaml is not YAML"),
    "an option that is none": ("check: !!bool x", "--config run.yaml is not YAML"),
    "no option": (
        "bach: 4",
        "run.yaml: there is no option bach. Did you mean batch? All options: roundpipe train --print-con",
    ),
    "no value": ("batch: {a: 1}", "run.yaml: batch is a dict. Write text, a number, true, false, or a list"),
    "wrong value": ("batch: many", "Invalid value for '--batch'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mistake_in_a_file_of_options_is_one_line(here, name, refused):
    content, words = CONFIGS[name]
    (here / "run.yaml").write_text(content)
    assert words in refused("train", "conf", "texts", "-o", "out", "--config", "run.yaml").err


def chats(folder, count=12):
    tiny.weights_folder(folder / "model", tokenizer=False)
    tiny.chat_tokenizer().save_pretrained(folder / "model")
    rows = [
        [{"from": "human", "value": "the pipe"}, {"from": "gpt", "value": " ".join(tiny.WORDS[: 1 + number % 4])}]
        for number in range(count)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"conversations": row}) for row in rows))


def test_conversations_are_learnt_and_shown_as_the_model_sees_them(here, capsys):
    """What counts stands between marks, as there are no colours here; the saved tokenizer chats with its template."""
    chats(here)
    assert main(["train", "model", "--chat", "chats.jsonl", "-o", "out", *FEW, "--show-rows", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("chat: 12 conversations, 102 tokens of model, of which 42 count; held out: 1")
    assert re.fullmatch(r"<user> ?the pipe ?</s> ?<assistant> ?«the.*</s> ?»", lines[1])
    assert "steps: 3 of 4 rows" in "\n".join(lines)
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<user> a </s> "
    (here / "own.jinja").write_text(tiny.CHAT.replace("</s>", "."))
    more = ["--pack", "--chat-template", "own.jinja", "--show-rows", "0", "--steps", "1"]
    assert main(["train", "model", "--chat", "chats.jsonl", "-o", "packed", *FEW, *more]) == 0
    assert re.match(r"chat: 12 conversations in \d rows, 102 tokens .* count; held out: 1", capsys.readouterr().out)
    assert "." in transformers.AutoTokenizer.from_pretrained("packed").chat_template


CHAT_MISTAKES = {
    "both": (["--text", "texts"], "--text and --chat cannot be combined. Leave one of"),
    "bytes": (["--model", "conf", "chats.jsonl"], "Conversations need a tokenizer with special tokens"),
    "form": (["--chat", "rows.jsonl"], "rows.jsonl:1 is not a conversation: it has 'body' (str). Each row must be"),
    "template": (["--chat-template", "gone.jinja"], "The chat template gone.jinja cannot be read"),
    "length": (["--length", "3"], "None of 12 conversations has an answer in its first 3 tokens. Use longer rows"),
    "text": (["--text", "chats.jsonl", "--field", "conversations"], "not text. If the list has messages: --c"),
}


@pytest.mark.parametrize("name", CHAT_MISTAKES)
def test_a_mistake_with_conversations_is_one_line(here, name, capsys, refused):
    more, words = CHAT_MISTAKES[name]
    chats(here)
    capsys.readouterr()
    (here / "rows.jsonl").write_text('{"body": "x"}')
    files = [] if name in ("form", "text") else ["--chat", "chats.jsonl"]
    command = ["train", *([] if "--model" in more else ["model"]), *files, "-o", "out", *FEW, *more]
    assert words in refused(*command).err


def test_the_saved_model_has_a_card_and_a_picture_of_its_losses(here, capsys):
    """With all losses, also those before a resume, and the last evaluation; paths are left out."""
    pytest.importorskip("matplotlib")
    command = ["train", "conf", str(here / "texts" / "0.txt"), "-o", "out", *FEW, "--plot", "losses.svg"]
    constant = ["--schedule", "constant", "--warmup", "0", "--checkpoint", "c"]
    assert main([*command, *constant]) == 0
    assert re.search(r"losses: \d\.\d{4} to \d\.\d{4}, drawn into losses.svg", capsys.readouterr().out)
    assert main([*command, *constant, "--steps", "4", "--resume", "--overwrite"]) == 0
    card = (here / "out" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d) \|", card, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"^\| 4 \| \d\.\d{4} \| \d\.\d{4} \|$", card, re.MULTILINE)
    assert "\n0.txt\n" in card
    assert str(here) not in card
    assert (here / "losses.svg").exists()


def test_adapters_trained_on_conversations_are_exported_in_one_line(here, capsys):
    """They are saved alone, and the folder names its model; the exported one continues a chat as the merged model."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    pytest.importorskip("onnxruntime")
    chats(here)
    more = ["--lora", "2,8,q_proj", "--lr", "1e-2"]
    assert main(["train", "model", "--chat", "chats.jsonl", "-o", "out", *FEW, *more]) == 0
    assert "of which 384 are trainable" in capsys.readouterr().out  # two matrices of 2 x 32 in each of three layers
    named = json.loads((here / "out" / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["r"], named["lora_alpha"]) == ("model", 2, 8)
    assert "library_name: peft\n" in (here / "out" / "README.md").read_text(encoding="utf-8")
    assert flatten(["export", "out", "-o", "onnx"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    ids = tokenizer("<user> the pipe </s> <assistant>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    merged = peft.AutoPeftModelForCausalLM.from_pretrained("out").merge_and_unload().eval()
    expected = merged.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    found = open_generator("onnx").generate(ids, max_new_tokens=6)
    assert found[0, ids.shape[1] :].tolist() == expected.tolist()


def test_what_is_logged_goes_where_it_is_reported_to(here, monkeypatch):
    from transformers.integrations import integration_utils

    logged = []

    class Own(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **options):
            logged.append(logs)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "own", Own)
    assert main(["train", "conf", "texts", "-o", "out", *FEW, "--report-to", "own"]) == 0
    assert [logs["learning_rate"] > 0 for logs in logged if "loss" in logs] == [True] * 3
    assert any("eval_loss" in logs for logs in logged)


def test_the_memory_of_a_virtual_device_can_be_limited(here, capsys):
    """A limit that is too small is refused by name; accelerators have a memory of their own."""
    command = ["train", "conf", "texts", "-o", "out", *FEW]
    assert main([*command, "--memory", "10MB"]) == 0
    # in one microbatch, so that nothing is proven before the first step
    assert main([*command, "--overwrite", "--memory", "20kB", "--microbatches", "1"]) == 2
    assert "--memory 20kB is too little: layer " in capsys.readouterr().err


def start(*arguments, folder, **options):
    words = ["-m", "roundpipe_runtime", *arguments]
    return fresh_process.start(*words, cwd=folder, imported=fresh_process.TRAINER, **options)


LONG = ["--length", "16", "--batch", "6", "--microbatches", "3", "--steps", "25", "--eval-every", "4", "--every", "2"]
LONG += ["--lr", "1e-2", "--no-check"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tiny.text_folder(folder / "texts")
    tiny.config_folder(folder / "conf")
    files = ["--model", folder / "conf", folder / "texts", "-o", folder / "out", "--metrics", folder / "m.jsonl"]
    assert main(["train", *map(str, files), *LONG, "--devices", "virtual:2"]) == 0
    return tiny.metrics_of(folder / "m.jsonl"), digest(folder / "out")


def stop(words, number, step, here):
    metrics = here / "parts.jsonl"
    with start(*words, "--devices", "virtual:1", folder=here) as process:
        process.wait_for(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= step)
        process.send_signal(number)
        return process.wait(), process.stdout


STOPS = [
    *((signal.SIGINT, 130, 3, "memory"), (signal.SIGTERM, 143, 6, "memory")),
    *((signal.SIGKILL, -9, 5, place) for place in ("memory", "disk")),
]


@pytest.mark.parametrize(("number", "status", "step", "place"), cases(STOPS, quick=STOPS[2:]))
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(here, whole, number, status, step, place, request):
    """In another process, on other devices, where it was killed from the last checkpoint. A disk is left empty."""
    stopped = ["train", "--model", "conf", "texts", *LONG, "-o", "parts", "--metrics", "parts.jsonl"]
    disk = request.getfixturevalue("folder_on_disk") if place == "disk" else None
    stopped += [] if disk is None else ["--host", f"disk:{disk}"]
    found, shown = stop(stopped, number, step, here)
    assert found == status
    assert not (here / "parts").exists()
    assert disk is None or list(disk.iterdir()) == []
    if number != signal.SIGKILL:
        said, line = shown.splitlines()[-2:]
        assert re.match(r"stopped after step \d+ of 25, saved in .*parts-checkpoints/checkpoint-\d+\. To cont", said)
        assert shlex.split(line) == ["roundpipe", *stopped, "--devices", "virtual:1", "--resume"]
    with start(*stopped, "--devices", "virtual:3", "--resume", folder=here) as process:
        assert (process.wait(), process.stderr) == (0, "")
        assert "continuing after step " in process.stdout
    assert tiny.metrics_of(here / "parts.jsonl") == whole[0]
    assert same_bits(digest("parts"), whole[1])
    assert disk is None or list(disk.iterdir()) == []


def test_on_a_terminal_there_is_a_bar(here):
    """That of the Trainer of transformers, below the lines about steps and evaluations."""
    pty = pytest.importorskip("pty", reason="terminals are those of Unix")
    termios = pytest.importorskip("termios", reason="terminals are those of Unix")
    own, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    command = ["train", "--model", "conf", "texts", "-o", "out", *FEW]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with start(*command, folder=here, env=environment, terminal=os.ttyname(its)) as process:
        os.close(its)
        shown = b""
        while True:
            try:
                part = os.read(own, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait() == 0
    os.close(own)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"\r100%\|█+\| 3/3 \[", text)
    assert re.findall(r"step (\d)/3  loss \d\.\d{4}  [\d,]+ tokens/s", text) == ["1", "2", "3"]
    assert "step 3/3  held-out loss" in text
    assert "{'loss'" not in text


# the word that is asked for, and the answer that is learnt
ANSWERS = {"pipe": "holds a layer", "layer": "then another one", "one": "and again the pipe"}


def test_a_killed_chat_training_is_resumed_exported_in_4_bits_and_answers(here, capsys):
    """Losses and weights are bitwise those of an uninterrupted run, and the folder gives the trained answers."""
    pytest.importorskip("onnxruntime")
    chats(here)
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in ANSWERS.items()
    ]
    (here / "chats.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in turns * 8))
    command = ["train", "model", "--chat", "chats.jsonl", "--length", "32", "--batch", "6", "--microbatches", "3"]
    command += ["--steps", "30", "--lr", "1e-2", "--every", "4", "--no-check"]
    one, other = (["-o", name, "--metrics", f"{name}.jsonl"] for name in ("undisturbed", "parts"))
    assert main([*command, *one, "--devices", "virtual:2"]) == 0
    assert stop([*command, *other], signal.SIGKILL, 15, here)[0] == -signal.SIGKILL
    assert not (here / "parts").exists()
    assert main([*command, *other, "--devices", "virtual:3", "--resume"]) == 0
    assert tiny.metrics_of(here / "parts.jsonl") == tiny.metrics_of(here / "undisturbed.jsonl")
    assert same_bits(digest("parts"), digest("undisturbed"))

    assert flatten(["export", "parts", "-o", "int4", "--quantize", "int4"]) == 0
    capsys.readouterr()
    assert flatten(["chat", "int4", "--message", "pipe", "--tokens", "9", "--greedy", "--json"]) == 0
    _, said = json.loads(capsys.readouterr().out)["messages"]
    assert said["content"] == ANSWERS["pipe"]
    for question, answer in ANSWERS.items():
        assert flatten(["generate", "int4", "--chat", "--prompt", question, "--tokens", "9", "--json"]) == 0
        assert [row["text"] for row in json.loads(capsys.readouterr().out)["rows"]] == [answer]


def test_transformers_is_quiet_meanwhile_and_as_before_afterwards(here, capsys, refused):
    """Its tables of missing weights and its bars are not part of what is said."""
    from transformers.utils import logging

    tiny.weights_folder(here / "model")
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    capsys.readouterr()
    shown = refused("train", "--model", "model", "texts", "-o", "out", *FEW).err
    assert shown.startswith("roundpipe: model lacks 9 weights, model.layers")
    assert "--unmatched-weights random" in shown
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
