"""A checkpoint of anybody: weights of another class, its tokenizer, code of its own, and paths that lead elsewhere."""

import builtins
import dataclasses
import json
import os
import pathlib

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig, LlamaForCausalLM

from roundpipe_runtime.fine_tune import FineTuneError, model_source
from tests.flatten.model_folder.exported_folders import restate, word_tokenizer
from tests.models import SIZES as MODEL_SIZES
from tests.runtime import tiny_training as tiny
from yobx_flatten import export_folder, open_generator
from yobx_flatten.__main__ import main
from yobx_flatten.errors import DamagedFileError, FlattenError, InvalidArgumentError, ModelSourceError
from yobx_flatten.model_folder.source.find import find_model, open_tokenizer, origin_of
from yobx_flatten.model_folder.source.open import open_model
from yobx_flatten.model_folder.write import write_companions
from yobx_flatten.registry.recipe import static_codec

SIZES = {"vocab_size": 96, **MODEL_SIZES}
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "missing": (lambda weights: weights.pop(MATRIX), f"lacks the weight {MATRIX} of LlamaForCausalLM"),
    "unused": (
        lambda weights: weights.update({"model.layers.1.mlp.gate_up.weight": torch.ones(3)}),
        "holds the weight model.layers.1.mlp.gate_up.weight, which LlamaForCausalLM does not have",
    ),
    "of another shape": (
        lambda weights: weights.update({MATRIX: torch.ones(48, 31)}),
        rf"{MATRIX} has shape \(48, 31\), but LlamaForCausalLM takes \(48, 32\)",
    ),
}
DOORS = {
    "loaded": lambda folder: find_model(str(folder)).load(),
    "streamed": lambda folder: open_model(find_model(str(folder)), dtype="float32", weights="stream", to="onnx"),
    "exported": lambda folder: export_folder(folder, folder.parent / "out"),
    "trained": lambda folder: model_source(folder).load(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_not_those_of_the_class_are_refused_by_name(change, door, llama):
    remove, message = CHANGES[change]
    _rewrite(llama, remove)
    choice = "unused" if change == "unused" else "random"
    with pytest.raises((ModelSourceError, FineTuneError), match=rf"(?s){message}.*unmatched.weights.*{choice}"):
        DOORS[door](llama)
    assert not (llama.parent / "out").exists()


def test_a_bert_as_it_was_published_is_exported_with_the_line_of_its_error(tmp_path):
    """Old names of norms and a stored range of positions are no difference; its second head is."""
    model = transformers.BertForPreTraining(BertConfig(**SIZES, max_position_embeddings=16))
    model.save_pretrained(tmp_path / "bert")
    restate(tmp_path / "bert/config.json", architectures=["BertForMaskedLM"])

    def published(weights):
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            weights[old] = weights.pop(name)
        weights["bert.embeddings.position_ids"] = torch.arange(16)[None]

    _rewrite(tmp_path / "bert", published)
    with pytest.raises(ModelSourceError) as raised:
        find_model(str(tmp_path / "bert")).load()
    message, line = str(raised.value).splitlines()
    assert "holds 4 weights, bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship" in message
    assert "position_ids" not in message
    assert line == '    unmatched_weights="unused" (--unmatched-weights unused)'
    found = find_model(str(tmp_path / "bert"))
    loaded = dataclasses.replace(found, unmatched_weights="unused").load().eval()
    assert isinstance(loaded, transformers.BertForMaskedLM)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).prediction_logits)


@pytest.mark.parametrize(
    "name", ["tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "model.bin", "model.gguf"]
)
def test_weights_in_another_form_are_not_replaced_by_random_ones(name, llama):
    """Their folder would look like one without weights; a GGUF file has its own configuration, maybe another one."""
    (llama / "model.safetensors").rename(llama / name)
    said = rf"contains {name}, but only safetensors and .*unmatched_weights"
    if name == "model.gguf":
        said = r"contains a GGUF file\. Pass the GGUF file: .*model\.gguf"
    with pytest.raises(ModelSourceError, match=said):
        find_model(str(llama)).load()


@pytest.mark.parametrize("weights", ["memory", "stream"])
def test_random_weights_on_purpose_and_of_a_folder_without_any_are_named_in_the_report(weights, llama):
    stored = load_file(llama / "model.safetensors")
    _rewrite(llama, lambda weights: weights.pop(MATRIX))
    done = export_folder(
        llama, llama.parent / "out", proof="none", weights=weights, unmatched_weights="random", to="onnx"
    )
    assert any(MATRIX in remark and "random" in remark for remark in done.reports["model.onnx"].remarks)
    found = find_model(str(llama))
    object.__setattr__(found, "unmatched_weights", "random")
    one, other = (found.load().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in stored)
    assert all(torch.equal(one[name], stored[name]) for name in stored if name != MATRIX)
    assert not torch.equal(one[MATRIX], stored[MATRIX])
    (llama / "model.safetensors").unlink()
    done = export_folder(llama, llama.parent / "none", proof="none")
    assert any("weights are random" in note for note in done.reports["model.onnx"].remarks)


def test_leaving_weights_out_does_not_allow_random_ones(llama):
    _rewrite(llama, lambda weights: weights.update({"more": torch.ones(3)}))
    done = export_folder(llama, llama.parent / "out", proof="none", unmatched_weights="unused")
    assert any("more" in remark for remark in done.reports["model.onnx"].remarks)
    _rewrite(llama, lambda weights: weights.pop(MATRIX))
    with pytest.raises(ModelSourceError, match="lacks the weight"):
        export_folder(llama, llama.parent / "other", proof="none", unmatched_weights="unused")


@pytest.mark.parametrize("weights", ["memory", "stream"])
def test_what_older_versions_stored_and_ties_are_no_differences(weights, tmp_path):
    """A tied head is not in the file; computed buffers were."""
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    opened = open_model(find_model(str(tmp_path)), dtype="float32", weights=weights, to="onnx")
    assert not [remark for remark in opened.remarks if "inv_freq" in remark]


def test_choices_for_weights_are_checked(llama, tmp_path):
    model = transformers.BertForSequenceClassification(BertConfig(**SIZES)).eval()
    with pytest.raises(InvalidArgumentError, match="unmatched_weights='random' is for a model given by name"):
        export_folder(model, tmp_path / "out", unmatched_weights="random")
    with pytest.raises(InvalidArgumentError, match="'refuse', 'unused', 'random', found 'yes'"):
        export_folder(llama, tmp_path / "out", unmatched_weights="yes")


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    word_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **MODEL_SIZES)).save_pretrained(folder)
    return folder


def _note(done):
    return next((note for note in done.reports["model.onnx"].remarks if "tokenizer" in note), None)


def _loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_loaded_model_has_the_tokenizer_of_its_checkpoint(is_adapted, checkpoint, tmp_path):
    model = _loaded(checkpoint)
    if is_adapted:
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora).merge_and_unload().eval()
    done = export_folder(model, tmp_path / "out", proof="none")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word0 word1")["input_ids"] == [2, 5, 6, 3]
    assert _note(done) is None


def test_a_folder_that_is_not_of_the_model_is_none(checkpoint):
    model = _loaded(checkpoint)
    assert origin_of(model)[0] == checkpoint
    model.resize_token_embeddings(310)
    reasons = [origin_of(model)]
    model = _loaded(checkpoint)
    restate(checkpoint / "config.json", model_type="mistral")
    reasons.append(origin_of(model))
    checkpoint.rename(checkpoint.parent / "elsewhere")
    reasons.append(origin_of(model))
    model.config.name_or_path = model.name_or_path = ""
    reasons.append(origin_of(model))
    assert [folder for folder, _ in reasons] == [None] * 4
    for (_, reason), words in zip(
        reasons,
        [
            "has a vocabulary of 300 tokens, but this model has 310",
            "is for 'mistral' models, but this model is of type 'llama'",
            "which is not a folder on this machine",
            "does not state the folder that it is from",
        ],
        strict=True,
    ):
        assert words in reason


@pytest.mark.slow
def test_no_tokenizer_is_invented(checkpoint, tmp_path):
    model = _loaded(checkpoint)
    model.config.name_or_path = model.name_or_path = ""
    done = export_folder(model, tmp_path / "out", proof="none")
    assert "does not state the folder that it is from" in _note(done)
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    done = export_folder(model, tmp_path / "out", proof="none", source=checkpoint, overwrite=True)
    assert _note(done) is None
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word0 word1")["input_ids"] == [2, 5, 6, 3]


@pytest.mark.slow
def test_a_model_given_by_type_reads_bytes(tmp_path):
    assert main(["export", "llama", "-o", str(tmp_path / "out"), "--proof", "none"]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a", add_special_tokens=False)["input_ids"] == [ord("a") + 3]


SOURCE = """
import pathlib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({mark!r}).touch()


class MyConfig(LlamaConfig):
    model_type = "mymodel"


class Negated(torch.nn.Linear):
    def forward(self, hidden):
        return -super().forward(hidden)


class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = Negated(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""


@pytest.fixture(autouse=True)
def _fail_on_a_question(monkeypatch, tmp_path):
    """transformers asks on the terminal whether code is to run, and somebody's input may begin with a y."""

    def ask(text=""):
        raise SystemExit(f"the user was asked: {text}")

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, initializer_range=0.5, eos_token_id=None, **MODEL_SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "own")
    (tmp_path / "own/modeling_my.py").write_text(SOURCE.format(mark=str(tmp_path / "ran")), "utf-8")
    named = {"AutoConfig": "modeling_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
    restate(tmp_path / "own/config.json", auto_map=named, model_type="mymodel", architectures=["MyForCausalLM"])
    return tmp_path / "own"


@pytest.mark.parametrize("model_type", ["mymodel", "llama"])
def test_code_of_a_folder_does_not_run(model_type, folder, tmp_path, capsys):
    restate(folder / "config.json", model_type=model_type)
    with pytest.raises(ModelSourceError, match=r"modeling_my\.MyConfig.*trust_remote_code=True") as refused:
        export_folder(folder, tmp_path / "out")
    assert "\n" not in str(refused.value)
    with pytest.raises(FineTuneError, match=r"needs its own code.*which is not run"):
        model_source(folder)
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_class_transformers_has_needs_no_code(folder, tmp_path):
    """As those of models that came to transformers after they were published, or with code of a tokenizer alone."""
    restate(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(find_model(str(folder)).load()) is LlamaForCausalLM
    assert not (tmp_path / "ran").exists()
    trusted = find_model(str(folder), trust_remote_code=True).load()  # as in transformers, its code is used then
    assert type(trusted).__name__ == "MyForCausalLM"
    restate(folder / "config.json", auto_map={"AutoTokenizer": ["own.Words", None]}, architectures=["MyForCausalLM"])
    assert type(find_model(str(folder)).load()) is LlamaForCausalLM


@pytest.mark.slow
def test_a_folder_that_is_trusted_generates_as_its_own_code(folder, tmp_path):
    assert main(["export", str(folder), "-o", str(tmp_path / "out"), "--trust-remote-code"]) == 0
    assert (tmp_path / "ran").exists()
    model = find_model(str(folder), trust_remote_code=True).load()
    assert type(model).__name__ == "MyForCausalLM"
    prompt = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(prompt, **options)
    assert torch.equal(open_generator(tmp_path / "out").generate(prompt, max_new_tokens=8), wanted)
    assert not torch.equal(LlamaForCausalLM.from_pretrained(folder).generate(prompt, **options), wanted)
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    with pytest.raises(ValueError, match="mymodel"):
        transformers.AutoConfig.from_pretrained(tmp_path / "out")


@pytest.fixture
def strange_folder(tmp_path):
    return tiny.weights_folder(tmp_path / "model")


CONFIGURATIONS = {
    "code of a repository": {"auto_map": {"AutoConfig": "owner/name--own.Config"}, "model_type": "own"},
    "an architecture that is a number": {"architectures": [5]},
    "architectures that are no list": {"architectures": {"a": 1}},
    "a kernel of the hub": {"attn_implementation": "owner/kernel"},
    "a kernel under its private name": {"_attn_implementation": "owner/kernel"},
    "a kernel for a part": {"attn_implementation": {"text_config": "owner/kernel"}},
    "a name for each of many labels": {"num_labels": 10**9},
    "a kind for each of many layers": {"num_hidden_layers": 10**9},
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_is_refused(strange_folder, case):
    restate(strange_folder / "config.json", num_labels=21_843)  # more than ImageNet has
    assert find_model(str(strange_folder)).config.num_labels == 21_843
    restate(strange_folder / "config.json", **CONFIGURATIONS[case])
    with pytest.raises(ModelSourceError):
        find_model(str(strange_folder))


@pytest.mark.parametrize(
    "case", ["a name for each of many labels", "a kind for each of many layers", "a kernel of the hub"]
)
def test_the_configuration_of_a_stored_value_is_refused(case):
    """As that of a folder: it is made by the same function of transformers."""
    config = tiny.config()
    dumped = static_codec.dump_static(config)
    name, text = dumped["!config"]
    assert static_codec.load_static(dumped).to_dict() == config.to_dict()
    with pytest.raises(FlattenError, match="states"):
        static_codec.load_static({"!config": [name, json.dumps({**json.loads(text), **CONFIGURATIONS[case]})]})


INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "an index of files elsewhere": lambda folder: restate(folder / INDEX, weight_map={"a": "../../../etc/passwd"}),
    "an index of files that are not there": lambda folder: restate(folder / INDEX, weight_map={"a": "b.safetensors"}),
    "an index of pickles elsewhere": lambda folder: restate(
        folder / "pytorch_model.bin.index.json", metadata={}, weight_map={"a": "/dev/zero"}
    ),
    "an index of something else": lambda folder: restate(folder / INDEX, weight_map=[1]),
    "a pipe": lambda folder: os.mkfifo(folder / "model.safetensors"),
    "a device": lambda folder: os.symlink("/dev/zero", folder / "model.safetensors"),
}


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_no_files_of_the_folder_are_refused(strange_folder, case):
    (strange_folder / "model.safetensors").unlink()
    WEIGHTS[case](strange_folder)
    with pytest.raises(ModelSourceError):
        find_model(str(strange_folder))


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
OWN = {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"}
PANIC = {"type": "Precompiled", "precompiled_charsmap": "////"}
TOKENIZERS = {
    "code next to it": {"tokenizer_config.json": OWN},
    "a list": {"tokenizer_config.json": []},
    "too deep": {"tokenizer_config.json": "[" * 100_000},
    "a panic of the library": {
        "tokenizer.json": {"version": "1.0", "added_tokens": [], "model": WORDS, "normalizer": PANIC}
    },
    "a text that doubles 40 times": {"tokenizer.json": {"normalizer": {"normalizers": [DOUBLED] * 40}}},
    "a text that doubles 40 times, in parts": {
        "tokenizer.json": {"normalizer": {"normalizers": [{"type": "Sequence", "normalizers": [DOUBLED] * 8}] * 5}}
    },
    "tokens that double 40 times": {"tokenizer.json": {"decoder": {"decoders": [DOUBLED] * 40}}},
    "a pipe": None,
}


@pytest.mark.skipif(os.name != "posix", reason="pipes")
@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_is_refused(tmp_path, case):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, content in (TOKENIZERS[case] or {}).items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if TOKENIZERS[case] is None:
        os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(DamagedFileError):
        open_tokenizer(tmp_path, failure=DamagedFileError)


@pytest.mark.parametrize(
    "stated", [{"model_max_length": "x"}, {"model_max_length": [1]}, {"chat_template": 5}, {"padding_side": 5}], ids=str
)
def test_a_tokenizer_whose_configuration_has_other_types_is_refused(tmp_path, stated):
    """It was opened, and ended in a TypeError when a text was read."""
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    open_tokenizer(tmp_path, failure=DamagedFileError)
    restate(tmp_path / "tokenizer_config.json", **stated)
    with pytest.raises(DamagedFileError, match=rf"Expected .* - at `\$\.{next(iter(stated))}`"):
        open_tokenizer(tmp_path, failure=DamagedFileError)


def test_a_link_to_another_file_is_not_copied_next_to_the_export(strange_folder, tmp_path):
    """What is exported may be published; the caches of hubs consist of links, which stay readable."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "out").mkdir()
    model = find_model(str(strange_folder)).load()
    (strange_folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelSourceError, match=r"notes\.txt is a link"):
        write_companions(tmp_path / "out", model, strange_folder)
    assert not (tmp_path / "out" / "notes.txt").exists()
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    (blobs / "0123").write_text("theirs")
    (snapshot / "notes.txt").symlink_to("../../blobs/0123")
    write_companions(tmp_path / "out", model, snapshot)
    assert (tmp_path / "out" / "notes.txt").read_text() == "theirs"


# what transformers reads of a folder, or an export copies
READ = [
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja",
    "additional_chat_templates/short.jinja",
]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["a private file", "no file", "itself", "a pipe", "a folder of links"])
def test_what_is_no_file_of_the_folder_is_not_read(strange_folder, tmp_path, name, kind):
    """Unknown entries of the file behind a link, such as a key, would reach what is exported."""
    private, path = tmp_path / "outside" / pathlib.Path(name).name, strange_folder / name
    private.parent.mkdir()
    private.write_text(json.dumps({**json.loads((strange_folder / "config.json").read_text()), "api_key": "mine"}))
    path.unlink(missing_ok=True)
    if kind == "a folder of links" and path.parent != strange_folder:
        path.parent.symlink_to(private.parent)
    else:
        path.parent.mkdir(exist_ok=True)
        aims = {"no file": "gone", "itself": path.name}
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to(aims.get(kind, private))
    with pytest.raises(ModelSourceError, match=r"is a link|not a regular file|contains no config\.json"):
        find_model(str(strange_folder))
    if name != "config.json":
        with pytest.raises(DamagedFileError, match=r"is a link|not a regular file"):
            open_tokenizer(strange_folder, failure=DamagedFileError)
