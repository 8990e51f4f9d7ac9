"""What a generation_config.json states is what a generator does, as model.generate: how long, how, to which end."""

import json

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as warpers

from tests.flatten.generate.eager_runner import EagerRunner
from tests.models import SIZES
from yobx_flatten import GenerationError, InvalidArgumentError, Sampling, export_folder, open_generator
from yobx_flatten.generate.generator import Generator
from yobx_flatten.generate.sampling import probabilities
from yobx_flatten.generate.settings import read_settings, settings_of
from yobx_flatten.generate.steps import Parts

SMALL = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5}
PROMPT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def _pair(config=None, **entries):
    """A model whose generation configuration has these entries, and a generator that reads them from its two files."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **{"eos_token_id": None, **(config or {})})).eval()
    model.generation_config = GenerationConfig(**{"pad_token_id": 0, "bos_token_id": 1, **entries})
    settings = settings_of(model.config.to_dict(), json.loads(model.generation_config.to_json_string()))
    return model, Generator(Parts(EagerRunner(model)), settings)


def _tokens(model, prompt=PROMPT, mask=MASK, **options):
    return model.generate(prompt, attention_mask=mask, **options)


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_length": 30}, {"max_length": 9}, {"max_new_tokens": 7, "max_length": 9}, {"max_new_tokens": 3}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_as_many_tokens_come_as_from_the_model(limits):
    model, generator = _pair(**limits)
    assert torch.equal(generator.generate(PROMPT, MASK), _tokens(model))
    assert len(list(generator.stream(PROMPT, MASK))) == _tokens(model).shape[1] - 4


def test_a_prompt_as_long_as_the_limit_is_refused():
    """transformers refuses it, too; a limit of the caller's own comes first."""
    model, generator = _pair(max_length=4)
    with pytest.raises(ValueError, match="max_length"):
        _tokens(model)
    with pytest.raises(InvalidArgumentError, match=r"has 4 tokens.*max_length in .* is 4\. Pass max_new_tokens"):
        generator.generate(PROMPT, MASK)
    assert generator.generate(PROMPT, MASK, max_new_tokens=2).shape == (2, 6)


DRAWS = [
    {},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_k": 0, "temperature": 0.9},
    {"top_p": 0.7, "temperature": 2.0},
    {"min_p": 0.2, "temperature": 3.0},
    {"typical_p": 0.5, "temperature": 2.0},
    {"temperature": 2.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
]


@pytest.mark.parametrize("entries", DRAWS, ids=str)
def test_tokens_are_drawn_as_stated(entries):
    model, generator = _pair(do_sample=True, **entries)
    torch.manual_seed(7)
    wanted = _tokens(model, max_new_tokens=12)
    torch.manual_seed(7)
    found = generator.generate(PROMPT, MASK, max_new_tokens=12)
    assert torch.equal(found, wanted)
    torch.manual_seed(7)
    streamed = torch.stack(list(generator.stream(PROMPT, MASK, max_new_tokens=12)), 1)
    assert torch.equal(streamed, wanted[:, 4:])
    likeliest = _tokens(model, max_new_tokens=12, do_sample=False)
    assert torch.equal(generator.generate(PROMPT, MASK, max_new_tokens=12, sampling=Sampling()), likeliest)
    assert not torch.equal(found, likeliest)


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(min_p=0.3), warpers.MinPLogitsWarper(0.3)),
        (Sampling(min_p=0.0), warpers.MinPLogitsWarper(0.0)),
        (Sampling(typical_p=0.2), warpers.TypicalLogitsWarper(0.2)),
        (Sampling(typical_p=0.95), warpers.TypicalLogitsWarper(0.95)),
        (Sampling(top_p=0.3), warpers.TopPLogitsWarper(0.3)),
    ],
    ids=["min_p=0.3", "min_p=0.0", "typical_p=0.2", "typical_p=0.95", "top_p=0.3"],
)
def test_probabilities_are_those_of_transformers(sampling, warper):
    scores = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9, 64)[:, None]
    expected = warper(None, scores.clone()).softmax(-1)
    torch.testing.assert_close(probabilities(scores, sampling), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "beams", [{"num_beams": 3}, {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}], ids=str
)
def test_a_search_is_made_as_stated(beams):
    model, generator = _pair(eos_token_id=5, **beams)
    assert torch.equal(generator.generate(PROMPT, MASK, max_new_tokens=12), _tokens(model, max_new_tokens=12))
    one = {"num_beams": 1, "max_new_tokens": 12}
    assert torch.equal(generator.generate(PROMPT, MASK, **one), _tokens(model, **one, early_stopping=False))


def test_a_search_that_draws_draws_the_tokens_of_the_model():
    model, generator = _pair(num_beams=3, do_sample=True)
    found = []
    searches = (lambda: _tokens(model, max_new_tokens=8), lambda: generator.generate(PROMPT, MASK, max_new_tokens=8))
    for tokens in searches:
        torch.manual_seed(7)
        found.append(tokens())
    assert torch.equal(*found)
    with pytest.raises(InvalidArgumentError, match=r"num_beams=1, or sampling=Sampling\(\)"):
        generator.generate(PROMPT, MASK, sampling=Sampling(do_sample=True))


def test_without_an_end_rows_go_on_as_in_the_model():
    """config.json has one, and generation_config.json none: transformers reads the second alone."""
    model, generator = _pair(config={"eos_token_id": 2})
    prompt = torch.arange(3, 93)[:, None]
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    assert bool((wanted[:, 1:-1] == 2).any())
    assert torch.equal(generator.generate(prompt, max_new_tokens=30), wanted)


def test_the_end_pads_where_no_other_token_does():
    """As in transformers, which does not look for one in config.json."""
    assert settings_of({"pad_token_id": 0, "eos_token_id": 4}, {"eos_token_id": [2, 3]}).pad_token_id == 2
    assert settings_of({"pad_token_id": 0, "eos_token_id": 4}, {}).pad_token_id == 0


@pytest.mark.parametrize(
    "rules",
    [
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_rules_of_an_encoder_are_of_a_decoders_prompt(rules, is_padded):
    """transformers applies them to what was given, also where a row is padded; the model would repeat it."""
    model, generator = _pair(**rules)
    plain, _ = _pair()
    for seed in range(50):
        begun = torch.randint(3, 96, (2, 2), generator=torch.Generator().manual_seed(seed))
        prompt = plain.generate(begun, attention_mask=torch.ones_like(begun), max_new_tokens=38, do_sample=False)
        mask = torch.ones_like(prompt)
        if is_padded:
            mask[0, :2] = 0
        wanted = _tokens(model, prompt, mask, max_new_tokens=12)
        if not torch.equal(wanted, _tokens(plain, prompt, mask, max_new_tokens=12)):
            break
    else:
        pytest.fail("the rule changes nothing: no test")
    assert torch.equal(generator.generate(prompt, mask, max_new_tokens=12), wanted)


@pytest.mark.parametrize(
    "entries",
    [
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": True, "eta_cutoff": 0.1},
        {"do_sample": True, "epsilon_cutoff": 0.02, "num_return_sequences": 2},
        {"sequence_bias": [[[5], 4.0]]},
        {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": 5},
    ],
    ids=str,
)
def test_other_loops_are_those_of_transformers(entries):
    """Where tokens do not come one after the other, there is nothing to stream."""
    model, generator = _pair(**entries)
    found, prompt = [], torch.tensor([[5, 6, 5, 6, 5]])
    for door in (model, generator):
        torch.manual_seed(7)
        found.append(door.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12))
    assert torch.equal(*found)
    if generator.settings.other_loops:
        with pytest.raises(GenerationError, match=rf"sets {generator.settings.other_loops[0]}, .* call generate"):
            generator.stream(prompt)


@pytest.mark.parametrize(
    "entry", [{"stop_strings": ["end"]}, {"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}]
)
def test_what_needs_more_than_files_is_refused_as_by_the_model(entry):
    _, generator = _pair(**entry)
    with pytest.raises(InvalidArgumentError, match=f"generate refuses this call, which sets {next(iter(entry))}: "):
        generator.generate(PROMPT, MASK, max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_folder_whose_entries_ask_for_another_loop_is_checked_in_the_plain_one(quantize, tmp_path):
    """Drafts take one row, and the checks of a folder have two; the folder then drafts as the model does."""
    model, _ = _pair(prompt_lookup_num_tokens=3)
    done = export_folder(model, tmp_path / "out", proof="sample", quantize=quantize)
    assert done.verified.ok
    if quantize is None:
        prompt = torch.tensor([[5, 6, 5, 6, 5]])
        wanted = _tokens(model, prompt, torch.ones_like(prompt), max_new_tokens=12)
        assert torch.equal(open_generator(tmp_path / "out").generate(prompt, max_new_tokens=12), wanted)
    model, _ = _pair(stop_strings=["end"])
    assert export_folder(model, tmp_path / "out", proof="sample", overwrite=True).verified.ok
    with pytest.raises(InvalidArgumentError, match="which sets stop_strings"):
        open_generator(tmp_path / "out").generate(PROMPT, MASK, max_new_tokens=3)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("temperature", 0.0), ("min_p", 3.0), ("top_p", -1.0), ("num_beams", 0), ("length_penalty", "x")],
)
def test_numbers_out_of_their_range_are_errors_of_the_file(entry, value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, entry: value}), "utf-8")
    with pytest.raises(GenerationError, match=r"generation_config\.json"):
        read_settings(tmp_path)


def test_the_generation_configuration_comes_first():
    """One end or several; without a padding token the first end pads, as in transformers."""
    assert settings_of({"eos_token_id": 5}, {"eos_token_id": [6, 7]}).eos_token_ids == (6, 7)
    assert settings_of({"eos_token_id": 5}, {}).pad_token_id == 5
    assert settings_of({"eos_token_id": 0, "pad_token_id": 0}, {}).eos_token_ids == (0,)


def test_special_tokens_of_a_text_model_in_a_larger_model_are_found():
    """A model for text and images states the end of a text in `text_config`."""
    found = settings_of({"text_config": {"eos_token_id": 4}, "image_token_index": 9}, {})
    assert (found.eos_token_ids, found.image_token_id) == ((4,), 9)


def test_a_damaged_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(GenerationError, match=r"config\.json is damaged"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_beams": 10**9}, "num_beams"),
        ({"num_return_sequences": 5000}, "num_return_sequences"),
        ({"forced_eos_token_id": 10**9}, r"forced_eos_token_id = 1,000,000,000, but its model has 300 tokens"),
        ({"bad_words_ids": [[5], [7, 300]]}, r"bad_words_ids = 300, but its model has 300 tokens"),
        ({"forced_bos_token_id": 300}, r"forced_bos_token_id = 300, but its model has 300 tokens"),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_a_loop_takes_memory(tmp_path, stated, message):
    """A billion beams are a billion rows; a token outside of the vocabulary is an index of no score."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(GenerationError, match=message):
        read_settings(tmp_path)
