"""`roundpipe train` and `plan` of a GGUF file, against the model that transformers reads from the same file."""

import json

import pytest
import torch

from roundpipe_runtime.__main__ import main
from roundpipe_runtime.fine_tune import FineTuneError, Settings, load_tokenizer, model_source, read_blocks
from tests.runtime import tiny_training as tiny
from tests.tiny_gguf import write
from yobx_flatten.model_folder.source.find import find_model

pytest.importorskip("typer")
pytest.importorskip("rich")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
pytest.importorskip("gguf")

FEW = ["--length", "16", "--batch", "4", "--microbatches", "2", "--steps", "2", "--devices", "virtual:1", "--no-check"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(tiny.prose())
    return tmp_path


def read_by_transformers(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


@pytest.mark.parametrize("types", [("F32", "F32"), ("F16", "F16"), ("Q4_1", "Q8_0")], ids="-".join)
def test_the_weights_are_those_that_transformers_reads(here, types):
    """In floating point, whatever the file stores, in the dtype of transformers and in another one."""
    path = write(here / "m.gguf", types)
    source = model_source(path)
    for dtype in (None, torch.bfloat16):
        found = source.load(dtype=dtype)
        plain = read_by_transformers(path, **({} if dtype is None else {"dtype": dtype}))
        assert found.dtype == plain.dtype
        expected = plain.state_dict()
        assert found.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert found.training


@pytest.mark.parametrize("name", ["m.gguf", "weights"], ids=["by its name", "by its first bytes"])
def test_a_training_is_that_of_the_model_of_transformers(here, capsys, name):
    """Loss and gradients of each step; the folder holds the model and the tokenizer in full."""
    path = write(here / "m.gguf").rename(here / name)
    given = ["--lr", "1e-3", "--warmup", "0", "--seed", "3", "--eval-share", "0", "--metrics", "m.jsonl"]
    assert main(["train", name, "--text", "a.txt", "-o", "out", *FEW, *given]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"model: {name}, ")
    rows = [json.loads(line) for line in (here / "m.jsonl").read_text().splitlines()]

    path = path.rename(here / "m.gguf")
    tokenizer = load_tokenizer(model_source(path))
    blocks = read_blocks([here / "a.txt"], tokenizer, length=16, eval_share=0.0, seed=3)
    settings = Settings(steps=2, batch=4, lr=1e-3, warmup=0, seed=3)
    expected = tiny.train_plainly(read_by_transformers(path), blocks, settings)
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)

    saved = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert "quantization_config" not in json.loads((here / "out" / "config.json").read_text())
    plain = transformers.AutoTokenizer.from_pretrained(here, gguf_file="m.gguf")
    text = "the pipe"
    assert transformers.AutoTokenizer.from_pretrained("out")(text).input_ids == plain(text).input_ids
    assert saved.config.vocab_size == read_by_transformers(path).config.vocab_size


def test_adapters_name_the_file_and_are_found_with_it(here):
    """Not where the file was read alone, which is gone; as peft adds them to the model of transformers."""
    peft = pytest.importorskip("peft")
    path = write(here / "m.gguf")
    assert main(["train", "m.gguf", "--text", "a.txt", "-o", "out", "--lora", "4", "--lr", "1e-2", *FEW]) == 0
    assert json.loads((here / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "m.gguf"
    found = find_model("out").load()
    expected = peft.PeftModel.from_pretrained(read_by_transformers(path), here / "out")
    ids = torch.arange(3, 11)[None]
    with torch.no_grad(), expected.disable_adapter():
        plain = expected(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(plain, expected(ids).logits, rtol=1e-2, atol=1e-2)


def test_a_plan_counts_the_weights_of_the_file(here, capsys):
    path = write(here / "m.gguf")
    assert main(["plan", "m.gguf", "--devices", "virtual:1", "--length", "16", "--batch", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    read_by_transformers(path).config.save_pretrained(here / "conf")
    assert main(["plan", "conf", "--devices", "virtual:1", "--length", "16", "--batch", "2", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    counted = ("parameters", "learning", "tokens", "layers", "host_memory")  # all else follows from measured times
    assert {key: shown[key] for key in counted} == {key: expected[key] for key in counted}
    assert shown["parameters"] == sum(one.numel() for one in read_by_transformers(path).parameters())


def test_a_folder_with_the_file_alone_names_it_and_a_damaged_file_is_refused(here, capsys):
    """Its configuration must not be taken for one of random weights."""
    read_by_transformers(write(here / "m.gguf")).config.save_pretrained(here)
    for _ in range(2):
        with pytest.raises(FineTuneError, match=r"contains m\.gguf\. Name the file instead of its folder: .*m\.gguf"):
            model_source(here)
        (here / "config.json").unlink(missing_ok=True)
    (here / "m.gguf").write_bytes(b"GGUF" + b"\0" * 40)  # damaged
    for command in (["plan", "m.gguf"], ["train", "m.gguf", "--text", "a.txt", "-o", "out"]):
        assert main(command) == 2
        assert "m.gguf" in capsys.readouterr().err
    assert not (here / "out").exists()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_type_has_the_vocabulary_of_its_tokenizer(here, kind):
    """So chats are tried offline; each row of the table is trained, also the first."""
    tiny.chat_tokenizer().save_pretrained(here / "words")
    turns = [{"role": "user", "content": "the pipe"}, {"role": "assistant", "content": "the wheel"}]
    (here / "c.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    given = ["--tokenizer", "words", "--chat", "c.jsonl", "-o", "out", *FEW]
    assert main(["train", kind, *given]) == 0
    saved = transformers.AutoModelForCausalLM.from_pretrained("out")
    plain = transformers.AutoTokenizer.from_pretrained("words")
    assert saved.get_input_embeddings().num_embeddings == len(plain)
    assert saved.get_input_embeddings().padding_idx is None
    assert saved.config.get_text_config(decoder=True).eos_token_id == plain.eos_token_id
