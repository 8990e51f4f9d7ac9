"""A cache that code of AOTInductor writes in place: buffers, proven, rewound and reordered next to the eager model."""

import os
import shutil

import pytest
import torch

pytest.importorskip("transformers")
if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("AOTInductor needs a C++ compiler", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.flatten.export.rewound_rows import assert_rows_go_on_after_a_rewind
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_program, open_generator
from yobx_flatten.errors import ReplayError
from yobx_flatten.export.runtimes import write as runtimes
from yobx_flatten.huggingface.cache_names import cache_of
from yobx_flatten.runners.open import open_runner

pytestmark = pytest.mark.slow  # each package is compiled for half a minute

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _llama(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval()


@pytest.fixture(scope="module")
def model():
    return _llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("aotinductor") / "llama"
    return export_folder(model, place, target="aotinductor", proof="sample")


def _prompt():
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_the_report_names_what_is_written_in_place(folder):
    """Each case is a loop over the buffers, next to the model; the manifest states the form of the cache."""
    report = folder.reports["model.pt2"]
    assert report.in_place == [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert report.ok
    assert max(case.steps for case in report.cases) == 3
    assert folder.verified.manifest.cache == "in_place"


OPTIONS = [
    {},
    {"prefill_chunk_size": 5},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 3, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_with_padding_generate_what_the_model_does(model, folder, options):
    """Greedily, with a prompt in pieces, and with beams, whose rows change places."""
    asked = {**_prompt(), "max_new_tokens": 20, **options}
    found = open_generator(folder.path, trust=True).generate(**asked)
    assert torch.equal(found, model.generate(**asked, do_sample=False))


def test_refused_drafts_are_written_over(model, folder):
    """A draft of another model is refused at most places; what lies after the tokens that stay is written again."""
    ids, generator = torch.tensor([[5, 6, 7, 8] * 6]), open_generator(folder.path, trust=True)
    found = generator.generate(ids, max_new_tokens=20, assistant_model=_llama(seed=1))
    assert torch.equal(found, model.generate(ids, do_sample=False, max_new_tokens=20))


def test_buffers_grow_are_cut_and_have_other_rows(model, folder):
    """Past 256 tokens the first buffers are full; then two tokens fewer, and rows 1, 0 and 1, as in the model."""
    runner = open_runner(folder.path / "model.pt2", trust=True)
    assert_rows_go_on_after_a_rewind(model, runner, [100, 200])


def test_each_number_of_tokens_fits_into_a_buffer(model, folder):
    """Token by token past 256, and past 514, where the buffers are as long as the text; next to the model itself."""
    asked = {**_prompt(), "max_new_tokens": 520}
    found = open_generator(folder.path, trust=True).generate(**asked)
    assert torch.equal(found, model.generate(**asked, do_sample=False))


def test_a_call_without_a_loop_leaves_its_inputs_as_they_are(model, folder):
    """The tensors of the caller are copied into buffers; other rows are refused before the code sees them."""
    runner = open_runner(folder.path / "model.pt2", trust=True)
    given = decode_inputs(model, DecodeSizes(batch=3, past=4, new=2))
    named = {name: given[name] for name in ("input_ids", "attention_mask")}
    named["position_ids"] = torch.arange(4, 6).expand(3, -1)
    for number, layer in enumerate(cache_of(given).layers):
        named |= {f"past_key_values.{number}.{part}": getattr(layer, f"{part}s").clone() for part in ("key", "value")}
    before = {name: tensor.clone() for name, tensor in named.items()}
    found = runner.run(named)
    with torch.no_grad():
        wanted = model(**given, position_ids=named["position_ids"])
    assert list(found) == list(runner.outputs)
    torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["present.1.value"], cache_of(wanted).layers[1].values, atol=1e-5, rtol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named.items())
    with pytest.raises(ReplayError, match=r"past_key_values.0.key has size 2 in axis 0, and model.pt2 takes 3 there"):
        runner.run({**named, "past_key_values.0.key": named["past_key_values.0.key"][:2]})


def test_layers_that_slide_keep_a_cache_that_is_returned(tmp_path):
    """Nothing is compiled twice for it: the program itself shows that such a layer returns something else."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=8)).eval()
    found = export_folder(model, tmp_path / "mistral", target="aotinductor", proof="sample")
    report = found.reports["model.pt2"]
    notes = [note for note in report.remarks if "the cache is copied by each call" in note]
    assert any("layers have a sliding window" in note for note in notes)
    assert (report.in_place, found.verified.manifest.cache) == ([], "growing")


def test_a_package_that_computes_something_else_is_left_out(model, tmp_path, monkeypatch):
    """The one that takes and returns the cache is written in its place, and the report states why; or on request."""
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])

    def stops(traced, path):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runtimes, "write_package_in_place", stops)
    report = exported.to_aotinductor(tmp_path / "model.pt2")
    reason = "a file that writes it in place was left out: RuntimeError: no such kernel"
    assert f"the cache is copied by each call: {reason}" in report.remarks
    assert (report.ok, report.in_place) == (True, [])
    asked = exported.to_aotinductor(tmp_path / "asked.pt2", cache="returned")
    assert not any("cache" in note for note in asked.remarks)
