"""LoRA adapters: merged into the model of a folder, or switched in one exported folder, next to what PEFT computes."""

import copy
import importlib.util
import itertools
import json
import os
import shutil
import warnings
from functools import partial

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from roundpipe_runtime.fine_tune import Lora, add_lora, load_tokenizer, model_source, save_model
from tests.cases import cases
from tests.flatten.model_folder.exported_folders import restate
from tests.models import SIZES
from yobx_flatten import OnnxGenerator, add_adapter, export_folder, load_case, open_generator, open_model, verify_folder
from yobx_flatten.__main__ import main
from yobx_flatten.core.files import limited
from yobx_flatten.errors import (
    DamagedFileError,
    FolderExistsError,
    GenerationError,
    InvalidArgumentError,
    ModelSourceError,
    ReplayError,
)
from yobx_flatten.huggingface.cache_names import cache_of, installed_name
from yobx_flatten.model_folder.source import adapter
from yobx_flatten.model_folder.source.adapter import read_adapters
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.open import open_model as open_source
from yobx_flatten.runners.open import open_runner

# PEFT 0.21 asks models of transformers 5.23 for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
NAMES = [None, "one", "two"]


def save_adapter(model, config, folder, seed=1, size=0.3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on layers that it does not know how to merge
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        adapted.save_pretrained(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("switched")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=259, initializer_range=0.3, eos_token_id=2, **SIZES)
    LlamaForCausalLM(config).save_pretrained(root / "base")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(root / "base")
    base = AutoModelForCausalLM.from_pretrained(root / "base")
    save_adapter(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), root / "one")
    other = peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules="all-linear", rank_pattern={"o_proj": 5})
    save_adapter(base, other, root / "two", seed=2)
    return root


def _base(root):
    return AutoModelForCausalLM.from_pretrained(root / "base").eval()


def _adapted(root, name):
    return _base(root) if name is None else peft.PeftModel.from_pretrained(_base(root), root / name).eval()


def _both(root):
    return {name: root / name for name in ("one", "two")}


@pytest.fixture(scope="module", params=[None, "onnxruntime"])
def folder(root, request):
    place = root / f"out-{request.param}"
    export_folder(root / "base", place, adapters=_both(root), optimize=request.param)
    return place


def _generate(model, count=16):
    mask = torch.ones_like(IDS)
    return model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=count, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_peft(name, root, folder):
    found = open_generator(folder).generate(IDS, max_new_tokens=16, adapter=name)
    assert torch.equal(found, _generate(_adapted(root, name)))
    others = [_generate(_adapted(root, other)) for other in NAMES if other != name]
    assert not any(torch.equal(found, other) for other in others)


@pytest.mark.slow
@torch.no_grad()
def test_without_an_adapter_the_scores_have_the_bits_of_a_file_without_adapters(root, folder, tmp_path):
    optimize = "onnxruntime" if "onnxruntime" in folder.name else None
    export_folder(root / "base", tmp_path / "plain", optimize=optimize, proof="sample")
    cases_ = [load_case(path) for path in (folder / "cases").glob("model-*.case")]
    plain, switched_ = (open_runner(place / "model.onnx") for place in (tmp_path / "plain", folder))
    for case in cases_:
        first, second = plain.run(case.inputs), switched_.run(case.inputs)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(cases_) > 2


@pytest.mark.slow
def test_each_adapter_is_verified_with_cases_of_its_own(folder, tmp_path):
    report = verify_folder(folder)
    assert report.ok
    assert {(check.adapter, check.file) for check in report.checks} >= {("one", "model.onnx"), ("two", "generate")}
    copied = shutil.copytree(folder, tmp_path / "copied")
    shutil.copy(copied / "adapters/two.safetensors", copied / "adapters/one.safetensors")
    assert {check.adapter for check in verify_folder(copied).checks if not check.ok} == {"one"}


@pytest.mark.slow
def test_streams_with_other_adapters_are_read_in_turns(root, folder):
    generator = open_generator(folder)
    streams = [generator.stream(IDS, max_new_tokens=8, adapter=name) for name in NAMES]
    found = list(itertools.chain.from_iterable(zip(*streams, strict=True)))
    for place, name in enumerate(NAMES):
        assert torch.equal(torch.stack(found[place::3], 1), _generate(_adapted(root, name), 8)[:, 4:])


@pytest.mark.slow
@torch.no_grad()
def test_weights_that_stay_integers_meet_an_adapter_in_float(root, tmp_path):
    """The weights of the base are integers of 4 bits with scales, so that nothing is rounded, as QLoRA has them."""
    model, generator = _base(root), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            whole = torch.randint(-8, 8, parameter.shape, generator=generator)
            whole.view(-1, 16)[:, :2] = torch.tensor([-8, 7])
            parameter.data = whole * 0.0625
    model.save_pretrained(tmp_path / "base")
    save_adapter(model, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]), tmp_path / "one")
    done = export_folder(
        tmp_path / "base", tmp_path / "out", adapters={"one": tmp_path / "one"}, quantize="keep", optimize="onnxruntime"
    )
    assert done.reports["model.onnx"].of_adapters["one"].ok
    of_files = open_model(tmp_path / "out")
    of_files.set_adapter("one")
    wanted = peft.PeftModel.from_pretrained(model, tmp_path / "one").eval()(input_ids=IDS).logits
    torch.testing.assert_close(of_files(input_ids=IDS).logits, wanted, atol=2e-3, rtol=1e-4)


KINDS = {
    "gpt2": (["c_attn", "c_proj"], {"optimize": "onnxruntime"}),  # matrices the other way round
    "t5": ("all-linear", {}),  # three files
    "bert": (["query", "value"], {}),  # one call
    "qwen2": ("all-linear", {"optimize": "onnxruntime"}),  # biases below the branch
    "qwen2_vl": (["q_proj", "qkv"], {}),  # two of three files
    "whisper": (["q_proj", "v_proj"], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(KINDS, quick=["gpt2", "t5"]))
def test_other_kinds_of_models_switch_adapters(kind, tmp_path):
    targets, options = KINDS[kind]
    model = small_model(kind)
    save_adapter(model, peft.LoraConfig(r=3, target_modules=targets), tmp_path / "one", size=0.1)

    def state():
        modules = {name: (set(vars(module)), module.training) for name, module in model.named_modules()}
        return modules, [parameter.requires_grad for parameter in model.parameters()]

    before = state()
    done = export_folder(model, tmp_path / "out", adapters={"one": tmp_path / "one"}, **options)
    assert {check.file for check in done.verified.checks if check.adapter} >= set(done.reports)
    assert state() == before


@pytest.mark.slow
def test_half_precision_is_allowed_what_it_costs(root, tmp_path):
    """PEFT multiplies in float32 next to a model in float16, and the file in float16."""
    done = export_folder(root / "base", tmp_path / "out", adapters=_both(root), dtype="float16", proof="sample")
    assert load_file(tmp_path / "out/adapters/one.safetensors")["model.layers.0.self_attn.q_proj.lora_A"].dtype == (
        torch.float16
    )
    assert done.verified.ok


@pytest.mark.slow
def test_a_model_of_transformers_switches_as_peft_does_and_refuses_what_files_cannot_do(root, folder):
    model = open_model(folder)
    assert model.active_adapters() == []
    model.set_adapter("two")
    assert model.active_adapters() == ["two"]
    assert torch.equal(_generate(model), _generate(_adapted(root, "two")))
    model.disable_adapters()
    assert model.active_adapters() == []
    assert torch.equal(_generate(model), _generate(_base(root)))
    model.enable_adapters()
    assert torch.equal(_generate(model), _generate(_adapted(root, "two")))
    cache = cache_of(model(input_ids=IDS))
    model.set_adapter("one")
    with pytest.raises(InvalidArgumentError, match="another adapter"):
        model(input_ids=IDS[:, :1], **{installed_name(): cache})
    with pytest.raises(InvalidArgumentError, match=r"same adapter for all rows of a call\. For each adapter, call"):
        model.generate(input_ids=IDS, adapter_names=["one", "two"])
    for call in (model.load_adapter, model.add_adapter):
        with pytest.raises(InvalidArgumentError, match="yobx-flatten adapter DIR NAME=FOLDER"):
            call("somewhere")


@pytest.mark.slow
def test_onnxruntime_genai_switches_the_adapters_of_the_folder(root, folder):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model = genai.Model(str(folder))
    adapters = genai.Adapters(model)
    for name in NAMES[1:]:
        adapters.load(str(folder / f"adapters/{name}.onnx_adapter"), name)
    for name in NAMES:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=20)
        generator = genai.Generator(model, params)
        if name is not None:
            generator.set_active_adapter(adapters, name)
        generator.append_tokens(IDS[:1].to(torch.int32).numpy())
        while not generator.is_done():
            generator.generate_next_token()
        assert generator.get_sequence(0).tolist() == _generate(_adapted(root, name))[0].tolist()


@pytest.fixture(scope="module")
def roomy(root):
    export_folder(root / "base", root / "roomy", adapters={}, proof="sample")
    return root / "roomy"


@pytest.mark.slow
def test_an_adapter_is_added_without_a_new_export_unless_the_files_compute_it_otherwise(root, roomy, tmp_path, capsys):
    copied = shutil.copytree(roomy, tmp_path / "out")
    other = _base(root)
    other.lm_head.weight.data *= 1.5
    with pytest.raises(ReplayError, match="files and PEFT return different values"):
        add_adapter(copied, "one", root / "one", model=other)
    assert open_generator(copied).adapters == []
    assert not (copied / "cases/adapters/one").exists()
    assert json.loads((copied / "yobx_flatten.json").read_text())["adapters"] == {}
    before = (copied / "model.onnx").stat()
    assert main(["adapter", str(copied), f"one={root / 'one'}", f"two={root / 'two'}"]) == 0
    assert "one: generate" in capsys.readouterr().out
    assert (copied / "model.onnx").stat().st_mtime_ns == before.st_mtime_ns
    assert open_generator(copied).adapters == ["one", "two"]
    for name in NAMES:
        found = open_generator(copied).generate(IDS, max_new_tokens=16, adapter=name)
        assert torch.equal(found, _generate(_adapted(root, name)))
    assert {check.adapter for check in verify_folder(copied).checks} == {"", "one", "two"}
    with pytest.raises(FolderExistsError, match="already has adapter 'one'"):
        add_adapter(copied, "one", root / "one")


@pytest.mark.slow
def test_an_adapter_is_replaced_as_a_whole_or_not_at_all(root, roomy, tmp_path, monkeypatch):
    """Its matrices, cases and entry belong together: a rename that fails leaves the adapter that was there."""
    copied = shutil.copytree(roomy, tmp_path / "out")
    add_adapter(copied, "one", root / "one")
    kept = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for path in kept:  # the names that files have in other folders, as in a backup by links
        backup = tmp_path / "backup" / path.relative_to(copied)
        backup.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, backup)
    replace = os.replace
    for number in (1, 2):
        calls = iter(range(1, 100))

        def failing(*names, number=number, calls=calls):
            if next(calls) == number:
                raise OSError("no rename")
            replace(*names)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(OSError, match="no rename"):
                add_adapter(copied, "one", root / "two", overwrite=True)
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == kept
    add_adapter(copied, "one", root / "two", overwrite=True)
    assert verify_folder(copied).ok
    found = open_generator(copied).generate(IDS, max_new_tokens=16, adapter="one")
    assert torch.equal(found, _generate(_adapted(root, "two")))
    assert all((tmp_path / "backup" / path.relative_to(copied)).read_bytes() == held for path, held in kept.items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_layers_without_room_are_named(root, tmp_path):
    export_folder(root / "base", tmp_path / "out", adapters={"one": root / "one"}, proof="none")
    words = r"k_proj\.lora_A, .*accept adapters in q_proj, v_proj\. Export the model"
    with pytest.raises(DamagedFileError, match=words):
        add_adapter(tmp_path / "out", "two", root / "two")
    export_folder(root / "base", tmp_path / "plain", proof="none")
    with pytest.raises(InvalidArgumentError, match=r"was exported without adapters(.|\n)*adapters=\{'two'"):
        add_adapter(tmp_path / "plain", "two", root / "two")


def test_a_wrong_product_is_not_published(root, tmp_path, monkeypatch):
    right = adapter._matrices

    def wrong(*args):
        return {name: 1.01 * one if name.endswith("lora_B") else one for name, one in right(*args).items()}

    monkeypatch.setattr(adapter, "_matrices", wrong)
    with pytest.raises(ReplayError, match=r"one: (the example|batch)"):
        export_folder(root / "base", tmp_path / "out", adapters={"one": root / "one"}, proof="sample")
    assert not (tmp_path / "out").exists()


UNFIT = {
    "DoRA": (peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True), "use_dora"),
    "a trained head": (peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head"),
    "a bias": (peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), "bias"),
    "IA3": (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_is_more_than_two_products_is_refused_with_the_way(kind, root, tmp_path):
    config, reason = UNFIT[kind]
    save_adapter(_base(root), config, tmp_path / "unfit")
    with pytest.raises(
        InvalidArgumentError, match=rf"{reason}(.|\n)*Merge the ad(.|\n)*yobx-flatten export \S+unfit -o"
    ):
        export_folder(root / "base", tmp_path / "out", adapters={"x": tmp_path / "unfit"})


def test_what_cannot_be_switched_is_refused(root, tmp_path):
    """PEFT takes the part that PiSSA begins with out of the model when it loads such a folder."""
    shutil.copytree(root / "one", tmp_path / "pissa")
    restate(tmp_path / "pissa/adapter_config.json", init_lora_weights="pissa")
    not_a_name = r"the name .* is not allowed"
    for adapters, how, words in [
        ({"x": tmp_path / "pissa"}, {}, "'pissa', which changes the base weights"),
        (_both(root), {"to": "program"}, r"found torch\. Merge the adapter instead"),
        (_both(root), {"layout": "transformers.js"}, r"found layout='transformers\.js'"),
        *(({name: root / "one"}, {}, not_a_name) for name in ("../one", "a/b", "", ".hidden")),
        ({"two": root / "two"}, {"model": _adapted(root, "one")}, "has adapters in its layers"),
        ({"x": root / "base"}, {}, r"base contains no adapter_config\.json"),
    ]:
        with pytest.raises((InvalidArgumentError, ModelSourceError), match=words):
            export_folder(**{"model": root / "base", "folder": tmp_path / "out", "adapters": adapters, **how})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sizes", [{"hidden_size": 48}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_model_is_refused_and_leaves_no_layer_behind(sizes, root, tmp_path):
    """PEFT stops after it has put its layers into the model, or leaves out what it has no place for."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **{**SIZES, **sizes})).eval()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ModelSourceError, match=r"one (is not an adapter of .*size mismatch|holds 4 weights)"):
        export_folder(model, tmp_path / "out", adapters={"one": root / "one"})
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model, "peft_config")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_writes_what_peft_writes_and_lists_the_adapters_there_are(command, root, folder, capsys):
    tokenizer, model = ByT5Tokenizer.from_pretrained(root / "base"), _adapted(root, "two")
    ids = tokenizer("Yes", add_special_tokens=command == "generate", return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    wanted = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    option = "--prompt" if command == "generate" else "--message"
    assert main([command, str(folder), option, "Yes", "--tokens", "9", "--adapter", "two", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    text = shown["rows"][0]["text"] if command == "generate" else shown["messages"][-1]["content"]
    assert text == tokenizer.decode(wanted, skip_special_tokens=True)
    with pytest.raises(GenerationError, match="has no adapter 'three'; found: one, two"):
        open_generator(folder).generate(IDS, adapter="three")
    assert main([command, str(folder), option, "x", "--adapter", "three"]) == 2
    assert "found: one, two" in capsys.readouterr().err


FIRST = "model.layers.0.self_attn.q_proj.lora_A"
DAMAGED = {
    "another name": (lambda held: held.update(more=torch.ones(2, 2)), "holds more, but .* have no such input"),
    "one without the other": (lambda held: held.pop(FIRST), "holds .*lora_B, but not .*lora_A"),
    "other sizes": (lambda held: held.update({FIRST: torch.ones(31, 4)}), r"shape \(31, 4\), .* take \(32, rank\)"),
    "another rank": (lambda held: held.update({FIRST: torch.ones(32, 9)}), "has a rank of 9, but .* of 4"),
    "a vector": (lambda held: held.update({FIRST: torch.ones(32)}), r"shape \(32,\)"),
    "another type": (lambda held: held.update({FIRST: torch.ones(32, 4).half()}), "dtype torch.float16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", DAMAGED)
def test_an_adapter_of_a_stranger_is_checked_before_it_is_used(change, folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "copied")
    held = load_file(copied / "adapters/one.safetensors")
    DAMAGED[change][0](held)
    save_file(held, copied / "adapters/one.safetensors")
    with pytest.raises(DamagedFileError, match=DAMAGED[change][1]):
        open_generator(copied).generate(IDS, adapter="one")


@pytest.mark.slow
def test_what_is_no_file_of_matrices_is_refused(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "copied")
    (copied / "adapters/one.safetensors").write_bytes(b"no matrices")
    with pytest.raises(DamagedFileError, match=r"one\.safetensors"):
        open_generator(copied).generate(IDS, adapter="one")
    (copied / "adapters/one.safetensors").unlink()
    os.mkfifo(copied / "adapters/one.safetensors")
    with pytest.raises(DamagedFileError, match="is not a regular file"):
        open_generator(copied).generate(IDS, adapter="one")


ROW = torch.tensor([[5, 6, 7, 8]])
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, initializer_range=0.5, eos_token_id=None, **SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _saved_adapter(base, config=None):
    config = config or peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    save_adapter(AutoModelForCausalLM.from_pretrained(base), config, base.parent / "adapter")
    return base.parent / "adapter"


@torch.no_grad()
def _logits(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()(input_ids=ROW).logits


MERGED = {
    "LoRA": None,
    "DoRA": peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True),
    "a head that was trained": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "all linear layers": peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules="all-linear"),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("kind", MERGED)
def test_the_model_of_an_adapter_is_the_adapted_one(kind, base):
    adapter = _saved_adapter(base, MERGED[kind])
    wanted = _logits(base, adapter)
    with torch.no_grad():
        found = find_model(str(adapter)).load()(input_ids=ROW).logits
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
    assert (wanted - _logits(base)).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("trained_by", ["PEFT", "roundpipe train --lora"])
def test_a_folder_of_adapters_is_exported(trained_by, base, tmp_path):
    if trained_by == "PEFT":
        adapter = _saved_adapter(base)
        ByT5Tokenizer(extra_ids=0).save_pretrained(base)
        done = export_folder(adapter, tmp_path / "out", proof="none")
        assert any("adapter" in note and "was merged" in note for note in done.reports["model.onnx"].remarks)
    else:
        source = model_source(base)
        model = add_lora(source.load(), Lora.parse("2"))
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.ones_like(parameter) if parameter.requires_grad else 0
        adapter = save_model(model, load_tokenizer(source, "bytes"), tmp_path / "adapter", source=source)
        assert main(["export", str(adapter), "-o", str(tmp_path / "out")]) == 0
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    mask = torch.ones_like(ROW)
    wanted = adapted.generate(input_ids=ROW, attention_mask=mask, max_new_tokens=16, do_sample=False)
    assert torch.equal(open_generator(tmp_path / "out").generate(ROW, max_new_tokens=16), wanted)
    assert (tmp_path / "out/tokenizer_config.json").is_file()
    assert not (tmp_path / "out/adapter_config.json").exists()


@pytest.mark.parametrize("change", [r"lacks the weight .*v_proj\.lora_B", "holds the weight more"])
def test_weights_that_are_not_those_of_the_adapter_are_refused_by_name(change, base):
    """PEFT warns of missing ones, and is silent about others."""
    adapter = _saved_adapter(base)
    weights = load_file(adapter / WEIGHTS)
    if change.startswith("lacks"):
        weights.pop(next(name for name in weights if "v_proj.lora_B" in name))
    else:
        weights["more"] = torch.ones(1)
    save_file(weights, adapter / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=change):
        find_model(str(adapter)).load()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"base_model_name_or_path": "./nowhere/base"}, r"nowhere/base of .* cannot be opened(.|\n)*merge_and_unload"),
        ({"base_model_name_or_path": None}, r"does not name its base model(.|\n)*merge_and_unload"),
        ({"base_model_name_or_path": "llama"}, "The base model llama of the adapter .* has no weights"),
        ({"megatron_config": {"a": 1}}, "names a module to import"),
        ({"peft_type": "OWN"}, "has peft_type 'OWN', unknown to PEFT"),
        ({"task_type": "NOPE"}, r"adapter_config\.json is not a configuration of PEFT: Invalid task type"),
        ({"peft_type": "ADALORA"}, "is not a configuration of PEFT"),
        ({"use_bdlora": 5}, "is not a configuration of PEFT"),
        ({"layer_replication": [[0, 1]] * 100_000}, "which is not a list of pairs .* at most 10,000 layers"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication"),
        ({"layer_replication": [[0, "1"]]}, "layer_replication"),
        ({"base_model_name_or_path": "../adapter"}, "is an adapter itself"),
    ],
)
def test_an_adapter_without_a_model_is_refused_with_what_to_do(entries, reason, base, monkeypatch):
    adapter = _saved_adapter(base)
    monkeypatch.chdir(base)  # names of folders are relative to the current one
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(ModelSourceError, match=reason):
        find_model(str(adapter))


def test_what_stands_next_to_an_adapter_is_ignored_or_refused(base):
    """transformers would load weights of a model, and not the model that the adapter names."""
    adapter = _saved_adapter(base)
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    assert find_model(str(adapter)).adapter == adapter
    (adapter / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(ModelSourceError, match=r"also weights of a model \(model\.safetensors\)\. Remove one"):
        find_model(str(adapter))


_BACKTRACKS = "(([a-z_.0-9]+)+)+!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")
@pytest.mark.parametrize(
    "entries",
    [
        {"target_modules": _BACKTRACKS},
        {"exclude_modules": _BACKTRACKS},
        {"rank_pattern": {_BACKTRACKS: 4}},
        {"modules_to_save": [_BACKTRACKS]},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_a_pattern_without_an_end_is_refused(entries, base, monkeypatch):
    monkeypatch.setattr(limited, "_CPU_SECONDS", 1)
    adapter = _saved_adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(
        ModelSourceError, match=r"adapter_config\.json has a pattern .* that cannot be matched with layers: .*CPU sec"
    ):
        find_model(str(adapter)).load()


@pytest.mark.parametrize(
    "entries",
    [{"r": 10**9}, {"r": 10**30}, {"r": "many"}, {"r": 4.5}, {"rank_pattern": {"q_proj": 10**9}}],
    ids=["r", "no number of the machine", "text", "fraction", "pattern"],
)
@pytest.mark.parametrize("is_switched", [False, True], ids=["merged", "switched"])
def test_a_rank_that_the_weights_do_not_have_is_refused(entries, is_switched, base):
    """PEFT would make matrices of 128 GB for each layer, before it looks at the weights."""
    adapter = _saved_adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    model = AutoModelForCausalLM.from_pretrained(base)
    read = partial(read_adapters, model, {"one": adapter}) if is_switched else find_model(str(adapter)).load
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json states rank .*at most 1,024"):
        read()


@pytest.mark.parametrize(
    "entries",
    [
        {"init_lora_weights": "pissa_niter_1000000000"},
        pytest.param(
            {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 10**9}},
            marks=pytest.mark.skipif(not importlib.util.find_spec("scipy"), reason="PEFT reads LoftQ with scipy only"),
        ),
        {"peft_type": "XLORA", "hidden_size": 8, "adapters": {"a": "owner/name"}},
    ],
    ids=["PiSSA", "LoftQ", "X-LoRA"],
)
def test_first_weights_of_many_steps_and_other_adapters_are_refused(entries, base):
    """PEFT would compute for hours what the file replaces, or load what the file names."""
    adapter = _saved_adapter(base)
    restate(adapter / "adapter_config.json", **entries)
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json (sets 1,000 or more iterations|is for X-LoRA)"):
        find_model(str(adapter)).load()


def test_adapters_that_no_file_holds_are_refused(base, tmp_path):
    """Learned prompts are inputs, and no file has such an input; a merged adapter changes weights that are streamed."""
    with pytest.raises(InvalidArgumentError, match="changes the weights"):
        open_source(find_model(str(_saved_adapter(base))), dtype="float32", weights="stream", to="onnx")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(InvalidArgumentError, match="contains learned prompts"):
        find_model(str(_saved_adapter(base, copy.copy(prompts))))
    with pytest.raises(InvalidArgumentError, match="learned prompts"):
        export_folder(peft.get_peft_model(small_model("llama"), copy.copy(prompts)).eval(), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("merged", "optimize"), [(False, "onnxruntime"), (True, None)])
def test_adapters_are_exported_as_weights_or_merged(merged, optimize, tmp_path):
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(small_model("llama"), lora).eval()
    ids = torch.randint(4, 259, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    wanted = adapted.generate(input_ids=ids, **options)
    assert not torch.equal(wanted, small_model("llama").generate(ids, **options))
    given = adapted.merge_and_unload() if merged else adapted
    assert export_folder(given, tmp_path / "out", optimize=optimize, proof="sample").task == "text-generation"
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert OnnxGenerator(tmp_path / "out", threads=1).generate(ids, max_new_tokens=20).tolist() == wanted.tolist()
