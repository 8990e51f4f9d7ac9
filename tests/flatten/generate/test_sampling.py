"""Which token comes next: drawn, searched, and by rules, as the configuration of generation asks for it."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.models import SIZES
from yobx_flatten import GenerationError, InvalidArgumentError, export_folder, make_dynamic_cache, open_generator
from yobx_flatten.generate import GenerationSettings, OnnxGenerator, ProgramGenerator, Sampling
from yobx_flatten.generate.generator import Generator
from yobx_flatten.generate.settings import read_settings, settings_of
from yobx_flatten.generate.steps import Parts
from yobx_flatten.runners.ports import Port, cache_slots, present_of

SMALL = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5}
PROMPT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


class EagerRunner:
    """The model itself in the place of a file, so that searches are compared without an export."""

    runtime, name = "eager", "the model"

    def __init__(self, model):
        self.model = model
        config = model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        names = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
        ports = [Port(name, (None, heads, None, size), torch.float32) for name in names]
        self.outputs = ("logits", *map(present_of, names))
        self.slots = cache_slots(ports, self.outputs)
        tokens = {name: Port(name, (None, None), torch.int64) for name in ("input_ids", "attention_mask")}
        self.ports = {**tokens, **{slot.port.name: slot.port for slot in self.slots}}

    def cache(self, tensors):
        return dict(tensors)

    @torch.no_grad()
    def step(self, feeds, cache, *, last_scores=False):
        leaves = list(cache.values())
        past = make_dynamic_cache([(leaves[0], leaves[1]), (leaves[2], leaves[3])])
        found = self.model(**feeds, **{WORD: past})
        leaves = [leaf for layer in cache_of(found).layers for leaf in (layer.keys, layer.values)]
        return {"logits": found.logits}, dict(zip(cache, leaves, strict=True))


def _pair(config=None, **entries):
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
    with pytest.raises(InvalidArgumentError, match=r"has 4 tokens.*max_length in .* allows 4 .*Pass max_new_tokens"):
        generator.generate(PROMPT, MASK)
    assert generator.generate(PROMPT, MASK, max_new_tokens=2).shape == (2, 6)


DRAWS = [
    {},
    {"top_k": 3, "temperature": 1.7},
    {"top_k": 500, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.95},
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
    assert torch.equal(torch.stack(list(generator.stream(PROMPT, MASK, max_new_tokens=12)), 1), wanted[:, 4:])
    likeliest = _tokens(model, max_new_tokens=12, do_sample=False)
    assert torch.equal(generator.generate(PROMPT, MASK, max_new_tokens=12, sampling=Sampling()), likeliest)
    assert not torch.equal(found, likeliest)


@pytest.mark.parametrize(
    "beams",
    [
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"num_beams": 4, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    ],
    ids=str,
)
def test_a_search_is_made_as_stated(beams):
    model, generator = _pair(eos_token_id=5, **beams)
    assert torch.equal(generator.generate(PROMPT, MASK, max_new_tokens=12), _tokens(model, max_new_tokens=12))
    one = {"num_beams": 1, "max_new_tokens": 12}
    assert torch.equal(generator.generate(PROMPT, MASK, **one), _tokens(model, **one, early_stopping=False))


def test_without_an_end_rows_go_on_as_in_the_model():
    """config.json has one, and generation_config.json none: transformers reads the second alone."""
    model, generator = _pair(config={"eos_token_id": 2})
    prompt = torch.arange(3, 93)[:, None]
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    assert bool((wanted[:, 1:-1] == 2).any())
    assert torch.equal(generator.generate(prompt, max_new_tokens=30), wanted)


@pytest.mark.parametrize(
    "rules",
    [
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_rules_of_an_encoder_are_of_a_decoders_prompt(rules, is_padded):
    """transformers applies them to what was given, also where a row is padded; the model would repeat it."""
    model, generator = _pair(**rules)
    plain, _ = _pair()
    begun = torch.randint(3, 96, (2, 2), generator=torch.Generator().manual_seed(1))
    prompt = plain.generate(begun, attention_mask=torch.ones_like(begun), max_new_tokens=38, do_sample=False)
    mask = torch.ones_like(prompt)
    mask[0, :2] = int(not is_padded)
    wanted = _tokens(model, prompt, mask, max_new_tokens=12)
    assert not torch.equal(wanted, _tokens(plain, prompt, mask, max_new_tokens=12)), "the rule changes nothing: no test"
    assert torch.equal(generator.generate(prompt, mask, max_new_tokens=12), wanted)


@pytest.mark.parametrize(
    "entries",
    [
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": True, "eta_cutoff": 0.1},
        {"do_sample": True, "epsilon_cutoff": 0.02, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"sequence_bias": [[[5], 4.0]]},
        {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": 5},
    ],
    ids=str,
)
def test_other_loops_are_those_of_transformers(entries):
    model, generator = _pair(**entries)
    found, prompt = [], torch.tensor([[5, 6, 5, 6, 5]])
    for door in (model, generator):
        torch.manual_seed(7)
        found.append(door.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12))
    assert torch.equal(*found)
    if generator.settings.other_loops:
        with pytest.raises(GenerationError, match=rf"not support {generator.settings.other_loops[0]}, .* Call gen"):
            generator.stream(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_folder_whose_entries_ask_for_another_loop_is_checked_in_the_plain_one(quantize, tmp_path):
    model, _ = _pair(prompt_lookup_num_tokens=3)
    assert export_folder(model, tmp_path / "out", proof="sample", quantize=quantize).verified.ok
    if quantize is None:
        prompt = torch.tensor([[5, 6, 5, 6, 5]])
        wanted = _tokens(model, prompt, torch.ones_like(prompt), max_new_tokens=12)
        assert torch.equal(open_generator(tmp_path / "out").generate(prompt, max_new_tokens=12), wanted)
    model, _ = _pair(stop_strings=["end"])
    assert export_folder(model, tmp_path / "out", proof="sample", overwrite=True).verified.ok
    with pytest.raises(InvalidArgumentError, match="which sets stop_strings"):
        open_generator(tmp_path / "out").generate(PROMPT, MASK, max_new_tokens=3)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"do_sample": True, "temperature": 0.0}, r"generation_config\.json"),
        ({"do_sample": True, "min_p": 3.0}, r"generation_config\.json"),
        ({"do_sample": True, "top_p": -1.0}, r"generation_config\.json"),
        ({"num_beams": 0}, r"generation_config\.json"),
        ({"length_penalty": "x"}, r"generation_config\.json"),
        ({"num_beams": 10**9}, "num_beams"),
        ({"num_return_sequences": 5000}, "num_return_sequences"),
        ({"forced_eos_token_id": 10**9}, r"forced_eos_token_id = 1,000,000,000, but the vocabulary has 300 tokens"),
        ({"bad_words_ids": [[5], [7, 300]]}, r"bad_words_ids = 300, but the vocabulary has 300 tokens"),
    ],
)
def test_numbers_out_of_their_range_are_errors_of_the_file_before_a_loop_takes_memory(stated, words, tmp_path):
    """A billion beams are a billion rows; a token outside of the vocabulary is an index of no score."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(GenerationError, match=words):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GenerationError, match=r"config\.json is damaged"):
        read_settings(tmp_path)


def test_what_the_configuration_of_generation_states_comes_first():
    """One end or several; without a padding token the first end pads, as in transformers; other entries do nothing."""
    assert settings_of({"eos_token_id": 5}, {"eos_token_id": [6, 7]}).eos_token_ids == (6, 7)
    assert settings_of({"eos_token_id": 5}, {}).pad_token_id == 5
    assert settings_of({"eos_token_id": 0, "pad_token_id": 0}, {}).eos_token_ids == (0,)
    assert settings_of({"pad_token_id": 0, "eos_token_id": 4}, {"eos_token_id": [2, 3]}).pad_token_id == 2
    assert settings_of({"pad_token_id": 0, "eos_token_id": 4}, {}).pad_token_id == 0
    of_text = settings_of({"text_config": {"eos_token_id": 4}, "image_token_index": 9}, {})
    assert (of_text.eos_token_ids, of_text.image_token_id) == ((4,), 9)
    assert settings_of({"forced_eos_token_id": 2}, {}).forced_eos_token_id == 2
    assert settings_of({"forced_eos_token_id": 2}, {"eos_token_id": 1}).forced_eos_token_id is None
    plain = settings_of({}, {"guidance_scale": 1.0, "sequence_bias": None, "num_beam_groups": 1, "min_length": 0})
    assert (plain.has_rules, plain.other_loops) == (False, ())
    asked = settings_of({}, {"guidance_scale": 1.5, "max_time": 2.0})
    assert (asked.has_rules, asked.other_loops) == (True, ("max_time",))


@pytest.mark.parametrize(
    ("entries", "options", "words"),
    [
        ({}, {"num_beams": 0}, "num_beams must be an int of 1 or more"),
        ({}, {"num_return_sequences": 2}, "generate refuses this call: .*num_return_sequences"),
        ({}, {"num_beams": 2, "early_stopping": "always"}, "generate refuses this call: .*early_stopping"),
        ({}, {"num_beams": 2, "sampling": Sampling(do_sample=True)}, "Beam search cannot use sampling"),
        # what needs more than files
        ({"stop_strings": ["end"]}, {}, "generate refuses this call, which sets stop_strings: "),
        ({"penalty_alpha": 0.6, "top_k": 4}, {}, "generate refuses this call, which sets penalty_alpha: "),
        ({"dola_layers": "low"}, {}, "generate refuses this call, which sets dola_layers: "),
    ],
)
def test_searches_that_mean_nothing_or_that_files_cannot_do_are_refused(entries, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        _pair(**entries)[1].generate(PROMPT, MASK, max_new_tokens=3, **options)


def test_a_seed_makes_draws_repeatable_and_leaves_the_global_generator_alone():
    _, generator = _pair()
    state = torch.random.get_rng_state()

    def drawn(seed):
        return generator.generate(PROMPT, MASK, max_new_tokens=9, sampling=Sampling(do_sample=True, seed=seed)).tolist()

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0}, "temperature must be a number above 0, found the int 0"),
        ({"top_k": 0}, "top_k must be an int of 1 or more"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Sampling(**options)


TOKENS = 10
SOURCE = torch.randint(4, 259, (3, 9), generator=torch.Generator().manual_seed(7))
PADDED = torch.ones_like(SOURCE).index_put_((torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])), torch.tensor(0))
INPUTS = {"input_ids": SOURCE, "attention_mask": PADDED}


def said(model, rules):
    return model.generate(**INPUTS, max_new_tokens=TOKENS, do_sample=False, num_beams=1, **rules).tolist()


def generated(name, rules, folder, to="program"):
    model, made = exported(name, to)
    copy = shutil.copytree(made, folder / "copy")
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **rules}), encoding="utf-8")
    opened = OnnxGenerator(copy) if to == "onnx" else ProgramGenerator(copy, trust=True)
    return said(model, rules), opened.generate(**INPUTS, max_new_tokens=TOKENS).tolist()


FORCED = [("bart", "onnx"), ("bart", "program"), ("mbart", "onnx"), ("marian", "onnx")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), cases(FORCED, quick=[("bart", "onnx")]))
def test_folders_whose_last_token_is_forced_are_written(name, to, tmp_path):
    wanted, found = generated(name, {}, tmp_path, to)
    forced = exported(name, to)[0].generation_config.forced_eos_token_id
    assert forced is not None
    assert [row[-1] for row in wanted] == [forced] * 3
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("bart", {"forced_bos_token_id": 5, "begin_suppress_tokens": [176]}),
        ("bart", {"bad_words_ids": [[176]]}),
        ("bart", {"eos_token_id": 176, "min_length": 6}),
        ("bart", {"eos_token_id": 176, "min_new_tokens": 4}),
        ("bart", {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1}),
        ("bart", {"encoder_repetition_penalty": 1.9}),
        ("bart", {"remove_invalid_values": True, "suppress_tokens": [176]}),
        ("mistral", {"begin_suppress_tokens": "the first tokens"}),
        ("mistral", {"repetition_penalty": 5.0}),
        ("mistral", {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}),  # what is padded is not repeated
        ("mbart", {"forced_bos_token_id": 77}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)
def test_a_rule_does_what_it_does_in_the_model(name, rules, tmp_path):
    plain = said(exported(name)[0], {})
    if "the first tokens" in rules.values():
        rules = {"begin_suppress_tokens": sorted({row[SOURCE.shape[1]] for row in plain})}
    wanted, found = generated(name, rules, tmp_path, "onnx")  # which open ten times as fast
    assert found == wanted
    assert wanted != plain


@pytest.mark.slow
def test_rules_can_be_given_for_a_file_that_stands_alone():
    _, folder = exported("bart", "program")
    settings = GenerationSettings((1,), 0, 0, forced_bos_token_id=9, forced_eos_token_id=(8, 7))
    found = ProgramGenerator(folder, settings=settings, trust=True).generate(SOURCE, PADDED, max_new_tokens=4)
    assert found[:, [1, -1]].tolist() == [[9, 7]] * 3  # of two alike the first
