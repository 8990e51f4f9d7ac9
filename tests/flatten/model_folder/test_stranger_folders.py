"""A model folder of a stranger runs no code, asks nobody, and leads to nothing outside of it."""

import builtins
import json
import os
import pathlib

import pytest
import torch
import transformers

from tests.flatten.model_folder.words import restate
from tests.runtime import tiny_training as tiny
from yobx_flatten import load_nested, save_nested
from yobx_flatten.errors import DamagedFileError, FlattenError, ModelSourceError
from yobx_flatten.model_folder.source.find import find_model, open_tokenizer
from yobx_flatten.model_folder.write import write_companions
from yobx_flatten.recipe import static_codec


@pytest.fixture(autouse=True)
def _fail_on_a_question(monkeypatch):
    """transformers asks on the terminal whether code is to run, and somebody's input may begin with a y."""

    def ask(text=""):
        raise SystemExit(f"the user was asked: {text}")

    monkeypatch.setattr(builtins, "input", ask)


@pytest.fixture
def folder(tmp_path):
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
def test_a_configuration_is_refused(folder, case):
    restate(folder / "config.json", **CONFIGURATIONS[case])
    with pytest.raises(ModelSourceError):
        find_model(str(folder))


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


def test_more_labels_than_imagenet_has_are_read(folder):
    restate(folder / "config.json", num_labels=21_843)
    assert find_model(str(folder)).config.num_labels == 21_843


WEIGHTS = {
    "an index of files elsewhere": lambda folder: restate(
        folder / "model.safetensors.index.json", weight_map={"a": "../../../etc/passwd"}
    ),
    "an index of files that are not there": lambda folder: restate(
        folder / "model.safetensors.index.json", weight_map={"a": "model-00001-of-00001.safetensors"}
    ),
    "an index of pickles elsewhere": lambda folder: restate(
        folder / "pytorch_model.bin.index.json", metadata={}, weight_map={"a": "/dev/zero"}
    ),
    "an index of something else": lambda folder: restate(folder / "model.safetensors.index.json", weight_map=[1]),
    "a pipe": lambda folder: os.mkfifo(folder / "model.safetensors"),
    "a device": lambda folder: os.symlink("/dev/zero", folder / "model.safetensors"),
}


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_no_files_of_the_folder_are_refused(folder, case):
    (folder / "model.safetensors").unlink()
    WEIGHTS[case](folder)
    with pytest.raises(ModelSourceError):
        find_model(str(folder))


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
TOKENIZERS = {
    "code next to it": {
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"}
    },
    "a list": {"tokenizer_config.json": []},
    "too deep": {"tokenizer_config.json": "[" * 100_000},
    "a panic of the library": {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "model": WORDS,
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"},
        }
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


def test_a_link_to_another_file_is_not_copied_next_to_the_export(folder, tmp_path):
    """What is exported may be published; the caches of hubs consist of links, which stay readable."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "out").mkdir()
    model = find_model(str(folder)).load()
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelSourceError, match=r"notes\.txt is a link"):
        write_companions(tmp_path / "out", model, folder)
    assert not (tmp_path / "out" / "notes.txt").exists()
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    (blobs / "0123").write_text("theirs")
    (snapshot / "notes.txt").symlink_to("../../blobs/0123")
    write_companions(tmp_path / "out", model, snapshot)
    assert (tmp_path / "out" / "notes.txt").read_text() == "theirs"


def test_the_values_of_a_good_configuration_come_back(tmp_path):
    """With its attention: what is refused is a name with a slash."""
    config = tiny.config()
    config._attn_implementation = "sdpa"
    save_nested(tmp_path / "values.onnx", {"config": config, "x": torch.zeros(1)})
    assert load_nested(tmp_path / "values.onnx")["config"].to_dict() == config.to_dict()


# what transformers reads of a folder, or an export copies
READ = [
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja",
    "additional_chat_templates/short.jinja",
]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["a private file", "no file", "itself", "a pipe", "a folder of links"])
def test_what_is_no_file_of_the_folder_is_not_read(folder, tmp_path, name, kind):
    """Unknown entries of the file behind a link, such as a key, would reach what is exported."""
    private, path = tmp_path / "outside" / pathlib.Path(name).name, folder / name
    private.parent.mkdir()
    private.write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "api_key": "mine"}))
    path.unlink(missing_ok=True)
    if kind == "a folder of links" and path.parent != folder:
        path.parent.symlink_to(private.parent)
    else:
        path.parent.mkdir(exist_ok=True)
        aims = {"no file": "gone", "itself": path.name}
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to(aims.get(kind, private))
    with pytest.raises(ModelSourceError, match=r"is a link|not a regular file|contains no config\.json"):
        find_model(str(folder))
    if name != "config.json":
        with pytest.raises(DamagedFileError, match=r"is a link|not a regular file"):
            open_tokenizer(folder, failure=DamagedFileError)
