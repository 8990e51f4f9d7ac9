"""``roundpipe plan`` as a user meets it."""

import itertools
import json
import re

import pytest
import torch

from matrix.models import make_config
from roundpipe_runtime.cli.app import run
from roundpipe_runtime.cli.option_objects import format_count, format_seconds, parse_bytes
from yobx_flatten.errors.failures import format_bytes
from yobx_flatten.terminal.running import UserError

CARDS = ["--devices", "cuda:0,cuda:1", "--bandwidth", "25", "--flops", "150"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration and no weights: 6.7 billion parameters."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A folder with a configuration of as wide layers, six of them: 1.5 billion parameters."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("short")
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", num_hidden_layers=6)
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file with a small configuration, of float32."""
    path = tmp_path_factory.mktemp("small")
    config = make_config("llama")
    config.dtype = "float32"
    config.save_pretrained(path)
    return path / "config.json"


def test_a_plan_says_what_is_needed_and_whether_it_fits(folder, capsys, monkeypatch):
    """Layers, stages, both memories, tokens, time and the verdict, in 80 columns, on stdout alone."""
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 10**12)
    request = ["plan", str(folder), *CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048"]
    assert run(request) == 0
    short = capsys.readouterr().out
    assert run([*request, "--details"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    assert lines[0].startswith("Devices: fits, ")
    assert lines[0].endswith(" of 25.8 GB")
    assert lines[1].startswith("Host: fits, ")
    assert lines[3:5] == ["LlamaForCausalLM, 6.74 billion parameters", "bfloat16, gradients and AdamW in float32"]
    assert re.search(r"a step +12 rows of 2048 tokens +3 microbatches", out)
    assert "model.layers.0 to 30" in out
    assert "fused" in out
    assert "this step has 24,576." in out
    assert "\x1b" not in out
    *first, empty, hint = short.splitlines()  # both are measured anew where a rate is that of this host
    assert len(first) < 20
    assert [line[:14] for line in first] == [line[:14] for line in lines[: len(first)]]
    assert (empty, hint[:9]) == ("", "--details")
    assert "model.layers" not in short


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the devices of this machine are planned then")
def test_a_size_of_memory_is_that_of_one_gpu(folder, capsys):
    """A laptop without a GPU is asked about one, not about devices that are made of its cores; `virtual:2` still is."""
    request = ["plan", str(folder), "--memory", "24GB", "--batch", "2", "--length", "64"]
    run([*request, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["hardware"]["names"], found["hardware"]["kind"]) == (["cuda:0"], "cuda")
    assert found["hardware"]["memory"] == 24 * 10**9
    assert found["fits"]["devices"] is True
    run(request)
    assert re.search(r"Devices: fits, .* of 24 GB", capsys.readouterr().out)
    run([*request, "--devices", "virtual:2", "--json"])
    assert json.loads(capsys.readouterr().out)["hardware"]["names"] == ["virtual:0", "virtual:1"]


def test_several_devices_share_the_head(small, capsys):
    """As many as are given; a word that is no number is refused."""
    request = ["plan", str(small), *CARDS[:-1], "1", "--memory", "24GiB"]
    run([*request, "--last-stage-copies", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["last_stage_copies"] == 2
    assert [stage["device"] for stage in found["stages"] if stage["kind"] == "fused"] in ([0, 1], [1, 0])
    run([*request, "--last-stage-copies", "auto", "--json"])
    assert json.loads(capsys.readouterr().out)["plan"]["last_stage_copies"] in (1, 2)
    assert run([*request, "--last-stage-copies", "many"]) == 2
    assert "--last-stage-copies is a number of devices" in capsys.readouterr().err


def test_adapters_leave_little_to_upload_where_weights_stay(short, capsys):
    """The plan states what staying would save; with it, the weights are on the device and the link is free."""
    request = ["plan", str(short), *CARDS, "--memory", "4GiB", "--batch", "12", "--length", "512", "--lora", "8"]
    run([*request, "--json"])
    moving = json.loads(capsys.readouterr().out)
    run([*request, "--details"])
    out = capsys.readouterr().out
    hint = next(line for line in out.splitlines() if "With --keep-parameters auto it copies" in line)
    run([*request, "--keep-parameters", "auto", "--json"])
    keeping = json.loads(capsys.readouterr().out)
    up = [max(link["up"] for link in found["step"]["links"]) for found in (moving, keeping)]
    assert up[1] < up[0]
    assert f"copies {format_bytes(up[1])} in" in hint
    assert keeping["step"]["seconds"] <= moving["step"]["seconds"]
    assert (moving["keep_parameters"], keeping["keep_parameters"]) == (0, "auto")
    # what two of the largest stages leave of 60 %, or all of the weights
    kept = {memory["kept"] for memory in keeping["device_memory"]}
    assert all(0 < one <= 0.6 * 4 * 2**30 for one in kept)
    run([*request, "--keep-parameters", "0.5", "--json"])
    some = json.loads(capsys.readouterr().out)
    assert {memory["kept"] for memory in some["device_memory"]} == {500_000_000}
    run([*request, "--keep-parameters", "0.5", "--details"])
    out = capsys.readouterr().out
    assert re.search("parameters that stay +500 MB", out)
    assert "With --keep-parameters" not in out


def test_numbers_are_those_of_the_json(folder, capsys):
    """Sizes in bytes, rates per second; the stages can be given to ModelExecutePlan."""
    run(["plan", str(folder), *CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == found["learning"] == 6_738_415_616
    assert found["hardware"]["memory"] == 24 * 2**30
    assert found["hardware"]["link"] == 25e9
    assert found["hardware"]["origin"] == {"flops": "given", "link": "given", "memory": "given"}
    assert (found["microbatches"], found["tokens"]) == (3, 12 * 2048)
    assert len(found["layers"]) == 34
    # masters, gradients, two moments of four bytes, and weights of two
    assert found["host_memory"]["total"] - found["host_memory"]["activations"] == pytest.approx(18 * 6.738e9, rel=1e-3)
    backward = found["plan"]["bwd_plan"]
    assert backward[0][1] == 34
    assert all(one[0] == other[1] for one, other in itertools.pairwise(backward))
    assert found["fits"]["devices"] is True


def test_what_does_not_fit_ends_with_1_and_says_what_would(short, capsys, monkeypatch):
    """The numbers of the change, too."""
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 12 * 10**9)
    request = ["plan", str(short), *CARDS, "--memory", "16GiB", "--batch", "128", "--length", "2048"]
    assert run(request) == 1
    out = capsys.readouterr().out
    assert "Devices: DOES NOT FIT" in out
    advice = next(line for line in out.splitlines() if "It fits with --microbatches" in line)
    assert "Host: DOES NOT FIT" in out
    assert "--lora 8" in out
    assert "--optim-dtype same" in out
    number = re.search(r"--microbatches (\d+),", advice)[1]
    run([*request, "--microbatches", number])
    assert "Devices: fits" in capsys.readouterr().out


def test_a_layer_that_is_too_large_says_how_much_a_device_needs(folder, capsys):
    """No change of the batch helps then."""
    assert run(["plan", str(folder), *CARDS, "--memory", "2GB", "--batch", "2", "--length", "64"]) == 1
    out = capsys.readouterr().out
    assert "Devices: DOES NOT FIT. layer" in out
    assert "A device needs" in out
    assert "It fits with" not in out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="these devices would be here")
def test_what_is_assumed_is_said(folder, capsys):
    """Of devices that are not here; without --memory nobody knows whether it fits."""
    run(["plan", str(folder), "--devices", "cuda:0", "--batch", "2", "--length", "64"])
    out = capsys.readouterr().out
    assert re.search(r"20 GB/s +assumed", out)
    assert "--bandwidth, --flops" in out
    assert re.search(r"memory +unknown: give it with --memory", out)
    assert "Devices: unknown; they need" in out


def test_adapters_are_planned(folder, capsys):
    """What learns is told apart."""
    pytest.importorskip("peft", reason="adapters are PEFT's")
    request = ["plan", str(folder), *CARDS, "--lora", "8,16,q_proj", "--batch", "2", "--length", "64", "--json"]
    run(request)
    found = json.loads(capsys.readouterr().out)
    assert found["learning"] == 32 * 2 * 8 * 4096
    assert found["host_memory"]["optimizer"] == 8 * found["learning"]


def test_a_type_of_model_is_a_small_one(capsys):
    """The same that `train` trains."""
    assert run(["plan", "llama", "--devices", "virtual:1", "--length", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] < 1e6
    assert run(["plan", "llama", "--devices", "virtual:1", "--length", "16"]) == 0
    verdict, *others = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Devices: "), verdict
    assert any(line.endswith(" parameters: a small model with random weights") for line in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "24"], "Write a number and its unit: --memory 24GiB"),
        (["--memory", "0GB"], "is not a size of memory"),
        (["--bandwidth", "0"], "--bandwidth must be a number above 0"),
        (["--keep-parameters", "some"], "--keep-parameters must be a number of GB (0 or more) or auto, found 'some'"),
        (["--flops", "nan"], "--flops must be a number above 0"),
        (["--devices", "gpu5x"], "names no device"),
        (["--devices", "virtual:0"], "names no device"),
        (["--microbatches", "9"], "8 rows cannot be split into 9 microbatches"),
        (["--length", "100000"], "--length"),
        (["--lora", "x"], "--lora 8"),
        (["--dtype", "int8"], "int8"),
        (["--batch", "0"], "--batch"),
        (["--update", "in_backward", "--host", "disk:."], "--update in_backward needs all weights in memory"),
        (["--update", "now"], "now"),
    ],
)
def test_wrong_options_are_one_line_and_2(small, capsys, options, message):
    """On stderr, with what to type; nothing on stdout."""
    assert run(["plan", str(small), *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert shown.out == ""


@pytest.mark.parametrize("name", ["nothing/here", "no_such_type"])
def test_a_model_that_does_not_exist_is_one_line_and_2(capsys, name):
    """Neither a folder nor a type."""
    assert run(["plan", name]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("roundpipe: ")
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_a_damaged_configuration_is_one_line_and_2(tmp_path, capsys):
    """A file that is no JSON, and one of another library."""
    for content in ("{", '{"model_type": "llama"', '{"a": 1}', "[]"):
        (tmp_path / "config.json").write_text(content)
        assert run(["plan", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("text", "count"), [("24GiB", 24 * 2**30), ("1.5 gb", 1_500_000_000), ("512MiB", 2**29)])
def test_sizes_are_read_with_their_units(text, count):
    """Of thousands, and of 1024."""
    assert parse_bytes(text, "--memory") == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24 gibi", "1e9GB", "24"])
def test_what_is_no_size_is_refused(text):
    """A number without a unit could be anything."""
    with pytest.raises(UserError, match="Write a number and its unit"):
        parse_bytes(text, "--memory")


def test_numbers_are_spelled_for_people():
    """Three digits, and a unit."""
    assert [format_count(n) for n in (12, 1_234, 1.3e12)] == ["12", "1.23 thousand", "1.3 trillion"]
    assert [format_seconds(s) for s in (0.0, 999.4, 1000)] == ["0 ms", "999 s", "17 min"]


def test_a_profile_stands_for_a_machine_that_is_not_here(small, tmp_path, capsys):
    """Its devices, its rates and its host; an option counts more."""
    profile = {"names": ["cuda:0", "cuda:1"], "flops": 1e12, "link": 1e9, "host": 64e9, "host_rate": 5e10}
    (tmp_path / "shop.json").write_text(json.dumps(profile))
    options = [str(small), "--machine", str(tmp_path / "shop.json"), "--length", "32"]
    assert run(["plan", *options, "--bandwidth", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hardware = found["hardware"]
    assert [hardware[key] for key in ("names", "flops", "link", "host")] == [
        ["cuda:0", "cuda:1"],
        1e12,
        2e9,
        64 * 10**9,
    ]
    assert run(["plan", *options, "--devices", "cuda:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["names"] == ["cuda:1"]
    step = found["step"]
    assert len(step["links"]) == 2
    assert step["bottleneck"] == max(step["busy"], key=step["busy"].get)
    assert step["seconds"] <= step["seconds_exact"] <= step["seconds"] + step["optimizer_seconds"]
    assert run(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert re.search("bottleneck +(compute|link up|link down|optimizer)", out)
    assert max(map(len, out.splitlines())) <= 80


def test_a_profile_that_is_none_is_one_line(small, tmp_path, capsys):
    """And nothing is planned."""
    (tmp_path / "shop.json").write_text("{}")
    assert run(["plan", str(small), "--machine", str(tmp_path / "shop.json")]) == 2
    assert "names is missing" in capsys.readouterr().err


def test_float32_states_of_8_billion_parameters_fit_into_128_gb(tmp_path, capsys, monkeypatch):
    """12 bytes per parameter and activations; the verdict on master weights names the option, with the same number."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **sizes).save_pretrained(tmp_path)
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 128 * 10**9)
    request = ["plan", str(tmp_path), *CARDS, "--memory", "80GB", "--batch", "32", "--length", "2048"]
    request += ["--microbatches", "8"]
    assert run(request) == 1
    advice = next(line for line in capsys.readouterr().out.splitlines() if "--update in_backward" in line)
    assert run([*request, "--update", "in_backward"]) == 0
    out = capsys.readouterr().out
    needed = re.search(r"Host: fits, (\d+) GB of 128 GB", out)[1]
    assert 12 * 8.03 < int(needed) < 128
    assert f"needs about {needed} GB, which fits" in advice
    assert max(map(len, [advice, *out.splitlines()])) <= 80
    assert "update in_backward" in out
    assert "during the backward" in out
    assert run([*request, "--update", "in_backward", "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host_memory"]
    assert host["masters"] == 0
    assert host["optimizer"] == 2 * 4 * 8030261248
    assert 0 <= host["parameters"] - 4 * 8030261248 < 10**4  # buffers


def test_a_reference_is_part_of_the_plan(short, capsys, monkeypatch):
    """Its weights count on the host, and its forward, one of three passes, in time; adapters need no second model."""
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 10**12)
    step = ["--memory", "24GiB", "--batch", "12", "--length", "2048", "--json"]
    plans = {}
    for name, options in (("without", []), ("with", ["--reference"]), ("adapters", ["--reference", "--lora", "8"])):
        assert run(["plan", str(short), *CARDS, *step, *options]) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    weights = plans["without"]["host_memory"]["parameters"]
    assert plans["without"]["reference"] is None
    assert plans["with"]["reference"]["host_bytes"] == weights
    assert plans["with"]["host_memory"]["total"] == plans["without"]["host_memory"]["total"] + weights
    assert plans["with"]["device_memory"] == plans["without"]["device_memory"]
    forward = sum(layer["forward_flops"] for layer in plans["without"]["layers"])
    computed = forward / 150e12 * 3 / 2  # three microbatches on two devices
    assert computed < plans["with"]["reference"]["seconds"] < 2 * computed
    assert plans["adapters"]["reference"]["host_bytes"] == plans["adapters"]["host_memory"]["reference"] == 0


def test_a_host_without_room_for_a_reference_is_named(short, capsys, monkeypatch):
    """It holds the model and all that trains it, and not another one."""
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 10**12)
    options = [*CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048"]
    assert run(["plan", str(short), *options, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["host_memory"]["total"]
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: total)
    assert run(["plan", str(short), *options]) == 0
    capsys.readouterr()
    assert run(["plan", str(short), *options, "--reference"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "The reference model takes" in out
    assert "Host: DOES NOT FIT" in out
