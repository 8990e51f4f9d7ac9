"""``roundpipe plan`` as a user meets it."""

import itertools
import json
import re

import pytest
import torch
from transformers import LlamaConfig

from matrix.models import make_config
from roundpipe_runtime.cli.app import run
from roundpipe_runtime.cli.option_objects import format_count, format_seconds, parse_bytes
from yobx_flatten.core.terminal.command_line import UserError
from yobx_flatten.errors.failures import format_bytes

CARDS = ["--devices", "cuda:0,cuda:1", "--bandwidth", "25", "--flops", "150"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration and no weights: 6.7 billion parameters."""
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A folder with a configuration of as wide layers, six of them: 1.5 billion parameters."""
    path = tmp_path_factory.mktemp("short")
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", num_hidden_layers=6).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    config = make_config("llama")
    config.dtype = "float32"
    config.save_pretrained(path)
    return str(path / "config.json")


@pytest.fixture
def host(monkeypatch):
    return lambda free: monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: free)


@pytest.fixture
def shown(capsys):
    def plan(*request, status=0):
        assert run(["plan", *request]) == status
        return capsys.readouterr().out

    return plan


@pytest.fixture
def found(capsys):
    def plan(*request):
        run(["plan", *request, "--json"])
        return json.loads(capsys.readouterr().out)

    return plan


def test_a_plan_says_what_is_needed_and_whether_it_fits(folder, shown, host):
    host(10**12)
    request = [folder, *CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048"]
    short, out = shown(*request), shown(*request, "--details")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Devices: fits, ")
    assert lines[0].endswith(" of 25.8 GB")
    assert lines[1].startswith("Host: fits, ")
    assert lines[3:5] == ["LlamaForCausalLM, 6.74 billion parameters", "bfloat16, gradients and AdamW in float32"]
    assert re.search(r"a step +12 rows of 2048 tokens +3 microbatches", out)
    for words in ("model.layers.0 to 30", "fused", "this step has 24,576."):
        assert words in out
    assert "\x1b" not in out
    *first, empty, hint = short.splitlines()  # both are measured anew where a rate is that of this host
    assert len(first) < 20
    assert [line[:14] for line in first] == [line[:14] for line in lines[: len(first)]]
    assert (empty, hint[:9]) == ("", "--details")
    assert "model.layers" not in short


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the devices of this machine are planned then")
def test_a_size_of_memory_is_that_of_one_gpu(folder, shown, found, host):
    """A laptop without a GPU is asked about one, not about devices that are made of its cores; `virtual:2` still is."""
    host(10**12)
    request = [folder, "--memory", "24GB", "--batch", "2", "--length", "64"]
    hardware = found(*request)["hardware"]
    assert (hardware["names"], hardware["kind"], hardware["memory"]) == (["cuda:0"], "cuda", 24 * 10**9)
    assert re.search(r"Devices: fits, .* of 24 GB", shown(*request))
    assert found(*request, "--devices", "virtual:2")["hardware"]["names"] == ["virtual:0", "virtual:1"]


def test_several_devices_share_the_head(small, found):
    request = [small, *CARDS[:-1], "1", "--memory", "24GiB"]
    two = found(*request, "--last-stage-copies", "2")
    assert two["plan"]["last_stage_copies"] == 2
    assert [stage["device"] for stage in two["stages"] if stage["kind"] == "fused"] in ([0, 1], [1, 0])
    assert found(*request, "--last-stage-copies", "auto")["plan"]["last_stage_copies"] in (1, 2)


def test_adapters_leave_little_to_upload_where_weights_stay(short, shown, found, host):
    """The plan states what staying would save; with it, the weights are on the device and the link is free."""
    host(10**12)
    request = [short, *CARDS, "--memory", "4GiB", "--batch", "12", "--length", "512", "--lora", "8"]
    moving, keeping = found(*request), found(*request, "--keep-parameters", "auto")
    lines = shown(*request, "--details").splitlines()
    hint = next(line for line in lines if "With --keep-parameters auto it copies" in line)
    up = [max(link["up"] for link in plan["step"]["links"]) for plan in (moving, keeping)]
    assert up[1] < up[0]
    assert f"copies {format_bytes(up[1])} in" in hint
    assert keeping["step"]["seconds"] <= moving["step"]["seconds"]
    assert (moving["keep_parameters"], keeping["keep_parameters"]) == (0, "auto")
    # what two of the largest stages leave of 60 %, or all of the weights
    kept = {memory["kept"] for memory in keeping["device_memory"]}
    assert all(0 < one <= 0.6 * 4 * 2**30 for one in kept)
    request += ["--keep-parameters", "0.5"]
    assert {memory["kept"] for memory in found(*request)["device_memory"]} == {500_000_000}
    out = shown(*request, "--details")
    assert re.search("parameters that stay +500 MB", out)
    assert "With --keep-parameters" not in out


def test_numbers_are_those_of_the_json(folder, found):
    plan = found(folder, *CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048")
    assert plan["parameters"] == plan["learning"] == 6_738_415_616
    assert (plan["hardware"]["memory"], plan["hardware"]["link"]) == (24 * 2**30, 25e9)
    assert plan["hardware"]["origin"] == {"flops": "given", "link": "given", "memory": "given"}
    assert (plan["microbatches"], plan["tokens"]) == (3, 12 * 2048)
    assert len(plan["layers"]) == 34
    # masters, gradients, two moments of four bytes, and weights of two
    assert plan["host_memory"]["total"] - plan["host_memory"]["activations"] == pytest.approx(18 * 6.738e9, rel=1e-3)
    backward = plan["plan"]["bwd_plan"]
    assert backward[0][1] == 34
    assert all(one[0] == other[1] for one, other in itertools.pairwise(backward))
    assert plan["fits"]["devices"] is True
    pytest.importorskip("peft", reason="adapters are PEFT's")
    plan = found(folder, *CARDS, "--lora", "8,16,q_proj", "--batch", "2", "--length", "64")
    assert plan["learning"] == 32 * 2 * 8 * 4096
    assert plan["host_memory"]["optimizer"] == 8 * plan["learning"]


def test_what_does_not_fit_ends_with_1_and_says_what_would(short, shown, host):
    """The numbers of the change, too; where a layer is too large, no change of the batch helps."""
    host(12 * 10**9)
    request = [short, *CARDS, "--memory", "16GiB", "--batch", "128", "--length", "2048"]
    out = shown(*request, status=1)
    advice = next(line for line in out.splitlines() if "It fits with --microbatches" in line)
    for words in ("Devices: DOES NOT FIT", "Host: DOES NOT FIT", "--lora 8", "--optim-dtype same"):
        assert words in out
    number = re.search(r"--microbatches (\d+),", advice)[1]
    assert "Devices: fits" in shown(*request, "--microbatches", number, status=1)
    out = shown(short, *CARDS, "--memory", "2GB", "--batch", "2", "--length", "64", status=1)
    assert "Devices: DOES NOT FIT. layer" in out
    assert "A device needs" in out
    assert "It fits with" not in out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="these devices would be here")
def test_what_is_assumed_is_said(folder, host, shown):
    """Of devices that are not here; without --memory nobody knows whether it fits."""
    host(10**12)
    out = shown(folder, "--devices", "cuda:0", "--batch", "2", "--length", "64")
    assert re.search(r"20 GB/s +assumed", out)
    assert re.search(r"memory +unknown: give it with --memory", out)
    assert "--bandwidth, --flops" in out
    assert "Devices: unknown; they need" in out


def test_a_type_of_model_is_a_small_one(shown, found):
    request = ["llama", "--devices", "virtual:1", "--length", "16"]
    assert found(*request)["parameters"] < 1e6
    verdict, *others = shown(*request).splitlines()
    assert verdict.startswith("Devices: "), verdict
    assert any(line.endswith(" parameters: a small model with random weights") for line in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "24"], "Write a number and its unit: --memory 24GiB"),
        (["--memory", "0GB"], "is not a size of memory"),
        (["--bandwidth", "0"], "--bandwidth must be a number above 0"),
        (["--keep-parameters", "some"], "--keep-parameters must be a number of GB (0 or more), or auto, found 'some'"),
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
        (["--last-stage-copies", "many"], "--last-stage-copies must be a number of devices"),
    ],
)
def test_wrong_options_are_one_line_and_2(small, capsys, options, message):
    assert run(["plan", small, *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert shown.out == ""


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "llama"', '{"a": 1}', "[]"])
def test_what_is_no_model_is_one_line_and_2(tmp_path, refused, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for name in ("nothing/here", "no_such_type") if content is None else (str(tmp_path),):
        assert refused("plan", name).out == ""


def test_numbers_are_read_with_their_units_and_spelled_for_people():
    """Of thousands, and of 1024; three digits; a number without a unit could be anything."""
    assert [parse_bytes(text, "--memory") for text in ("1.5 gb", "512MiB")] == [1_500_000_000, 2**29]
    for text in ("", "GiB", "-1GiB", "24 gibi", "1e9GB", "24"):
        with pytest.raises(UserError, match="Write a number and its unit"):
            parse_bytes(text, "--memory")
    assert [format_count(n) for n in (12, 1_234, 1.3e12)] == ["12", "1.23 thousand", "1.3 trillion"]
    assert [format_seconds(s) for s in (0.0, 999.4, 1000)] == ["0 ms", "999 s", "17 min"]


def test_a_profile_stands_for_a_machine_that_is_not_here(small, tmp_path, capsys, shown, found):
    """Its devices, its rates and its host; an option counts more; a file that is no profile is one line."""
    profile = {"names": ["cuda:0", "cuda:1"], "flops": 1e12, "link": 1e9, "host": 64e9, "host_rate": 5e10}
    (tmp_path / "shop.json").write_text(json.dumps(profile))
    options = [small, "--machine", str(tmp_path / "shop.json"), "--length", "32"]
    plan = found(*options, "--bandwidth", "2")
    assert {key: plan["hardware"][key] for key in ("names", "flops", "link", "host")} == {
        "names": ["cuda:0", "cuda:1"], "flops": 1e12, "link": 2e9, "host": 64 * 10**9,
    }  # fmt: skip
    assert found(*options, "--devices", "cuda:1")["hardware"]["names"] == ["cuda:1"]
    step = plan["step"]
    assert len(step["links"]) == 2
    assert step["bottleneck"] == max(step["busy"], key=step["busy"].get)
    assert step["seconds"] <= step["seconds_exact"] <= step["seconds"] + step["optimizer_seconds"]
    out = shown(*options)
    assert re.search("bottleneck +(compute|link up|link down|optimizer)", out)
    assert max(map(len, out.splitlines())) <= 80
    (tmp_path / "shop.json").write_text("{}")
    assert run(["plan", *options]) == 2
    assert "names is missing" in capsys.readouterr().err


def test_float32_states_of_8_billion_parameters_fit_into_128_gb(tmp_path, shown, found, host):
    """12 bytes per parameter and activations; the verdict on master weights names the option, with the same number."""
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **sizes).save_pretrained(tmp_path)
    host(128 * 10**9)
    request = [str(tmp_path), *CARDS, "--memory", "80GB", "--batch", "32", "--length", "2048", "--microbatches", "8"]
    advice = next(line for line in shown(*request, status=1).splitlines() if "--update in_backward" in line)
    request += ["--update", "in_backward"]
    out = shown(*request)
    needed = re.search(r"Host: fits, (\d+) GB of 128 GB", out)[1]
    assert 12 * 8.03 < int(needed) < 128
    assert f"needs about {needed} GB, which fits" in advice
    assert max(map(len, [advice, *out.splitlines()])) <= 80
    assert "update in_backward" in out
    assert "during the backward" in out
    memory = found(*request)["host_memory"]
    assert (memory["masters"], memory["optimizer"]) == (0, 2 * 4 * 8030261248)
    assert 0 <= memory["parameters"] - 4 * 8030261248 < 10**4  # buffers


def test_a_reference_is_part_of_the_plan(short, shown, found, host):
    """Its weights count on the host, its forward in time; adapters need no second model. A host too small is named."""
    host(10**12)
    request = [short, *CARDS, "--memory", "24GiB", "--batch", "12", "--length", "2048"]
    alone, with_it = found(*request), found(*request, "--reference")
    adapters = found(*request, "--reference", "--lora", "8")
    weights, total = (alone["host_memory"][name] for name in ("parameters", "total"))
    assert alone["reference"] is None
    assert with_it["reference"]["host_bytes"] == weights
    assert with_it["host_memory"]["total"] == total + weights
    assert with_it["device_memory"] == alone["device_memory"]
    forward = sum(layer["forward_flops"] for layer in alone["layers"])
    computed = forward / 150e12 * 3 / 2  # three microbatches on two devices
    assert computed < with_it["reference"]["seconds"] < 2 * computed
    assert adapters["reference"]["host_bytes"] == adapters["host_memory"]["reference"] == 0
    host(total)
    shown(*request)
    out = shown(*request, "--reference", status=1)
    assert max(map(len, out.splitlines())) <= 80
    assert "The reference model takes" in out
    assert "Host: DOES NOT FIT" in out
