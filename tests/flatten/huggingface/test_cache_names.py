"""Which argument and which entry of an output is the cache, by signatures and values."""

import copy

import onnx
import peft
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.cache_words import WORD
from tests.models import make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    GenerationError,
    OnnxGenerator,
    decode_inputs,
    dynamic_shapes,
    export_onnx,
    load_case,
    register_flattening_functions,
    replay_case,
    save_case,
)
from yobx_flatten.huggingface.cache_names import CACHE, argument_of, cache_of, forward_of, name_in, named_for
from yobx_flatten.runners.ports import KEPT_SCORES

WORDS = ("cache", "past_key_values", "cache_params")


def of(word, annotation=None):
    scope = {"Cache": DynamicCache, "Tensor": torch.Tensor}
    exec(f"def forward(self, input_ids, {word}{f': {annotation}' if annotation else ''} = None): ...", scope)
    return scope["forward"]


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_read_off_a_signature(word):
    assert argument_of(of(word)) == word
    assert argument_of(of(word, "Cache")) == word
    assert argument_of(of(word, "tuple[tuple[Tensor]] | None")) == word  # what RoBERTa's forward still states


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "XmodForCausalLM", "ErnieForCausalLM", "BertGenerationDecoder"])
def test_forwards_that_state_tuples_of_tensors_take_a_cache(name):
    assert argument_of(getattr(transformers, name).forward) == WORD


def test_a_word_of_tomorrow_is_found_by_its_type():
    assert argument_of(of("states", "Cache | None")) == "states"
    assert argument_of(of("cache", "Tensor")) is None
    assert argument_of(of("cache", "dict[str, Tensor]")) is None
    assert argument_of(of("states", "list[Tensor]")) is None
    assert argument_of(of("features")) is None


def test_a_usual_word_counts_by_its_value():
    assert name_in({"cache": DynamicCache()}) == "cache"
    assert name_in({"cache": [{"key": torch.zeros(1), "value": torch.zeros(1)}]}) == "cache"
    assert name_in({"cache": torch.zeros(1)}) is None
    assert name_in({"cache": {"features": torch.zeros(1)}}) is None
    assert name_in({"cache": None}) == "cache"


def test_an_output_answers_by_its_own_entry():
    """Whatever the installed release calls it, and without a warning that the word is an old one."""
    cache = DynamicCache()
    output = BaseModelOutputWithPast(last_hidden_state=torch.zeros(1), **{WORD: cache})
    assert cache_of(output) is cache
    assert name_in(output) == WORD
    assert cache_of((1, 2)) is None


def test_an_adapter_s_model_is_asked_for_the_forward_inside():
    """PEFT's models take `*args` and `**kwargs`."""
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert argument_of(forward_of(model)) == WORD


@pytest.mark.parametrize("word", WORDS[:2])
def test_arguments_of_another_release_are_renamed(word):
    given = {"input_ids": 1, word: DynamicCache(), "use_cache": True}
    for own in WORDS:
        assert list(named_for(of(own), given)) == ["input_ids", own, "use_cache"]
    assert named_for(of("features"), given) == given


@pytest.fixture(scope="module")
def llama():
    model = make_model("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def other_word(inputs):
    word = next(word for word in WORDS[:2] if word != WORD)
    return {word if name == WORD else name: value for name, value in inputs.items()}


@pytest.mark.slow
def test_files_have_one_word_and_take_every_word(llama, tmp_path):
    inputs = other_word(decode_inputs(llama, DecodeSizes()))
    case = Case("another word", kwargs=other_word(decode_inputs(llama, DecodeSizes(batch=3, past=9, new=2))), steps=2)
    path = tmp_path / "model.onnx"
    done = export_onnx(llama, (), inputs, path=path, dynamic_shapes=dynamic_shapes(inputs), cases=[case])
    assert done.report.ok
    caches = [name for name in done.report.input_names if name not in ("input_ids", "attention_mask")]
    assert caches == [f"{CACHE}.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    prompt = torch.tensor([[5, 6, 7, 8]])
    want = llama.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(OnnxGenerator(path).generate(prompt, max_new_tokens=6), want)
    # a case that was stored under another word
    given = decode_inputs(llama, DecodeSizes(batch=1, past=4, new=1))
    with torch.no_grad():
        outputs = llama(**copy.deepcopy(given))
    save_case(tmp_path / "case.onnx", other_word(given), outputs)
    assert replay_case(load_case(tmp_path / "case.onnx"), path).ok


@pytest.mark.slow
def test_a_program_is_called_under_every_word(llama, tmp_path):
    inputs = decode_inputs(llama, DecodeSizes())
    other = decode_inputs(llama, DecodeSizes(batch=3, past=9, new=2))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        want = llama(**copy.deepcopy(other)).logits
        # torch's own call with a word of another release
        shapes = dynamic_shapes(other_word(inputs))
        program = torch.export.export(llama, (), other_word(inputs), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2")
        for one in (program, loaded):
            for given in (other, other_word(other)):
                torch.testing.assert_close(one.module()(**copy.deepcopy(given)).logits, want, atol=1e-5, rtol=0)


class Forgets(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, past_key_values):
        kwargs = {"input_ids": input_ids, "attention_mask": attention_mask, WORD: past_key_values}
        return {"logits": self.model(**kwargs).logits}


@pytest.mark.parametrize("proof", ["full", "none"])
def test_a_cache_that_is_not_returned_comes_out_of_the_file(llama, tmp_path, proof):
    """The model extends it, so the next call needs it; without a next call, the file leaves it out.

    Such a file has no input for the scores of the last token either, which is for generating.
    """
    inputs = {CACHE if name == WORD else name: value for name, value in decode_inputs(llama, DecodeSizes()).items()}
    report = export_onnx(Forgets(llama), (), inputs, path=tmp_path / "model.onnx", proof=proof).report
    assert report.output_names[:2] == ["logits", "present.0.key"]
    (note,) = [remark for remark in report.remarks if "loop=False" in remark]
    assert note.startswith(f"forward extends {CACHE} but does not return the result")
    report = export_onnx(Forgets(llama), (), inputs, path=tmp_path / "score.onnx", proof=proof, loop=False).report
    assert report.output_names == ["logits"]
    taken = {
        name: [value.name for value in onnx.load(tmp_path / name).graph.input] for name in ("model.onnx", "score.onnx")
    }
    assert KEPT_SCORES in taken["model.onnx"]
    assert KEPT_SCORES not in taken["score.onnx"]


@pytest.mark.slow
def test_cache_outputs_of_other_names_are_refused_when_a_file_is_opened(llama, tmp_path):
    """A generator would feed the old cache again; a replay would compare by position."""
    export_onnx(llama, (), decode_inputs(llama, DecodeSizes()), path=tmp_path / "model.onnx", proof="none")
    model = onnx.load(tmp_path / "model.onnx")
    for node in model.graph.node:
        node.output[:] = [name.replace("present.", "kept.") for name in node.output]
        node.input[:] = [name.replace("present.", "kept.") for name in node.input]
    for value in model.graph.output:
        value.name = value.name.replace("present.", "kept.")
    onnx.save(model, tmp_path / "kept.onnx")
    with pytest.raises(GenerationError, match=r"kept\.onnx takes past_key_values\.0\.key and does not return present"):
        OnnxGenerator(tmp_path / "kept.onnx")
    given = decode_inputs(llama, DecodeSizes(batch=1, past=4, new=1))
    with torch.no_grad():
        outputs = llama(**copy.deepcopy(given))
    save_case(tmp_path / "case.onnx", given, outputs)
    with pytest.raises(GenerationError, match="does not return present"):
        replay_case(load_case(tmp_path / "case.onnx"), tmp_path / "kept.onnx")
