"""What a file that writes its cache in place does, whatever its runtime: next to the eager model."""

from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, open_generator
from yobx_flatten.huggingface.cache_names import cache_of
from yobx_flatten.runners.in_place import cache_tensors, cropped, select_rows
from yobx_flatten.runners.open import open_runner

__all__ = ["LEAVES", "SIZES", "WritesInPlace", "WritesIntoBuffers", "padded_prompt", "small_llama", "small_mistral"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LEAVES = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
# greedily, with a prompt in pieces, and with beams, whose rows change places
OPTIONS = [
    {},
    {"prefill_chunk_size": 5},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 3, "no_repeat_ngram_size": 2},
]


def small_llama(seed: int = 0, **others: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **others)).eval()


def small_mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=8)).eval()


def padded_prompt(rows: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _feeds(tokens: torch.Tensor, seen: int) -> dict[str, torch.Tensor]:
    rows, new = tokens.shape
    positions = torch.arange(seen, seen + new).expand(rows, -1)
    mask = torch.ones(rows, seen + new, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


class WritesInPlace:
    """The tests of one runtime. The module of a subclass has the fixtures `model` and `folder` of a small Llama."""

    file = ""
    opened: ClassVar[dict[str, Any]] = {}
    calls = (100, 200)  # past the first buffers, which have room for 256 tokens

    def test_the_report_names_what_is_written_in_place(self, folder):
        report = folder.reports[self.file]
        assert report.in_place == LEAVES
        assert report.ok
        assert max(case.steps for case in report.cases) == 3
        assert folder.verified.manifest.cache == "in_place"

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_rows_with_padding_generate_what_the_model_does(self, model, folder, options):
        asked = {**padded_prompt(), "max_new_tokens": 20, **options}
        found = open_generator(folder.path, **self.opened).generate(**asked)
        assert torch.equal(found, model.generate(**asked, do_sample=False))

    @pytest.mark.parametrize("drafts", ["lookup", "assistant"])
    def test_refused_drafts_are_taken_back(self, model, folder, drafts):
        ids, generator = torch.tensor([[5, 6, 7, 8] * 6]), open_generator(folder.path, **self.opened)
        assistant = {"assistant_model": small_llama(seed=1)}
        options = assistant if drafts == "assistant" else {"prompt_lookup_num_tokens": 4}
        found = generator.generate(ids, max_new_tokens=20, **options)
        assert torch.equal(found, model.generate(ids, do_sample=False, max_new_tokens=20))

    def test_a_cache_grows_is_cut_and_has_other_rows(self, model, folder):
        """Read so many tokens per call, take two back, go on with rows 1, 0 and 1."""
        runner = open_runner(folder.path / self.file, **self.opened)
        count = sum(self.calls)
        ids = torch.randint(3, 128, (2, count), generator=torch.Generator().manual_seed(2))
        cache = runner.cache({name: torch.zeros(2, 2, 0, 16) for name in runner.in_place})
        seen = 0
        for new in self.calls:
            _, cache = runner.step(_feeds(ids[:, seen : seen + new], seen), cache)
            seen += new
        assert {tuple(leaf.shape) for leaf in cache_tensors(cache).values()} == {(2, 2, count, 16)}
        cache = cropped(runner, cache, count, count - 2)
        cache = select_rows(runner, cache, torch.tensor([1, 0]))
        cache = select_rows(runner, cache, torch.tensor([0, 1, 0]))
        new = torch.tensor([[9], [10], [11]])
        found, cache = runner.step(_feeds(new, count - 2), cache)
        with torch.no_grad():
            wanted = model(torch.cat([ids[[1, 0, 1], : count - 2], new], dim=1), use_cache=True)
        torch.testing.assert_close(found["logits"][:, -1], wanted.logits[:, -1], atol=1e-5, rtol=0)
        keys = cache_tensors(cache)["past_key_values.1.key"]
        torch.testing.assert_close(keys, cache_of(wanted).layers[1].keys, atol=1e-5, rtol=0)

    def test_a_call_without_a_loop_leaves_its_inputs_as_they_are(self, model, folder):
        runner = open_runner(folder.path / self.file, **self.opened)
        given = decode_inputs(model, DecodeSizes(batch=3, past=4, new=2))
        named = {name: given[name] for name in ("input_ids", "attention_mask")}
        named["position_ids"] = torch.arange(4, 6).expand(3, -1)
        leaves = [leaf.clone() for layer in cache_of(given).layers for leaf in (layer.keys, layer.values)]
        named |= dict(zip(LEAVES, leaves, strict=True))
        before = {name: tensor.clone() for name, tensor in named.items()}
        for _ in range(2):
            found = runner.run(named)
        with torch.no_grad():
            wanted = model(**given, position_ids=named["position_ids"])
        assert list(found) == list(runner.outputs)
        torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["present.1.value"], cache_of(wanted).layers[1].values, atol=1e-5, rtol=0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in named.items())
        with pytest.raises(ReplayError, match=rf"0.key has size 2 in axis 0, and {self.file} takes 3 there"):
            runner.run({**named, "past_key_values.0.key": named["past_key_values.0.key"][:2]})


class WritesIntoBuffers(WritesInPlace):
    def test_each_number_of_tokens_fits_into_a_buffer(self, model, folder):
        asked = {**padded_prompt(), "max_new_tokens": 520}
        found = open_generator(folder.path, **self.opened).generate(**asked)
        assert torch.equal(found, model.generate(**asked, do_sample=False))
