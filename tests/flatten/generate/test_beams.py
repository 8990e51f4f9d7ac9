"""A beam search over exported files finds what `model.generate(num_beams=...)` finds."""

import pytest

from tests.cases import cases
from tests.flatten.generate.eager_runner import EagerRunner
from tests.flatten.generate.test_generator import prompts
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import GenerationSettings, InvalidArgumentError, OnnxGenerator, ProgramGenerator, Sampling
from yobx_flatten.generate.generator import Generator
from yobx_flatten.generate.settings import settings_of
from yobx_flatten.generate.steps import Parts
from yobx_flatten.model_folder.source.configuration import small_model


@pytest.fixture(scope="module")
def llama():
    """A small model of which every third token or so is an end."""
    return small_model("llama")


ENDS = tuple(range(3, 259, 4))


@pytest.mark.parametrize(
    ("options", "pad", "ends"),
    [
        ({"num_beams": 4, "num_return_sequences": 3, "length_penalty": -1.0}, 2, ENDS),
        ({"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0, "early_stopping": True}, 0, ENDS[:2]),
        ({"num_beams": 2, "early_stopping": "never"}, 2, ()),
    ],
)
def test_a_search_finds_the_sequences_of_the_library(llama, options, pad, ends):
    generator = Generator(Parts(EagerRunner(llama)), GenerationSettings(eos_token_ids=ends, pad_token_id=pad))
    found = generator.generate(**prompts(), max_new_tokens=14, **options)
    llama.generation_config.eos_token_id = list(ends) or None
    wanted = llama.generate(**prompts(), max_new_tokens=14, do_sample=False, pad_token_id=pad, **options)
    assert found.tolist() == wanted.tolist()


def test_rules_for_scores_hold_for_every_beam(llama):
    """They change log-probabilities in a search; padding in front of a row does not count as a token of it."""
    rules = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "forced_eos_token_id": 7}
    plain = {"eos_token_id": [7, 11, 19], "pad_token_id": 2}
    generator = Generator(Parts(EagerRunner(llama)), settings_of({}, {**plain, **rules}))
    options = {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 2}
    wanted = llama.generate(**prompts(), do_sample=False, **plain, **rules, **options)
    assert generator.generate(**prompts(), **options).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 0}, "num_beams must be an int of 1 or more"),
        ({"num_return_sequences": 2}, "generate refuses this call: .*num_return_sequences"),
        ({"num_beams": 2, "early_stopping": "always"}, "generate refuses this call: .*early_stopping"),
        ({"num_beams": 2, "sampling": Sampling(do_sample=True)}, "draws no tokens"),
    ],
)
def test_searches_that_mean_nothing_are_refused(llama, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Generator(Parts(EagerRunner(llama)), GenerationSettings()).generate(**prompts(), **options)


def _check(generator, model, inputs, **options):
    options = {"num_beams": 3, "num_return_sequences": 2, **options}
    found = generator.generate(**inputs, max_new_tokens=20, **options)
    wanted = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    assert found.tolist() == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimize"),
    cases(
        [("llama", None), ("mistral", None), ("llama", "onnxruntime"), ("mistral", "onnxruntime")],
        quick=[("llama", None), ("mistral", None), ("mistral", "onnxruntime")],
    ),
)
def test_the_cache_follows_the_beams(name, optimize):
    model, folder = exported(name, optimize=optimize)
    _check(OnnxGenerator(folder, threads=1), model, prompts())


@pytest.mark.slow
@pytest.mark.parametrize("to", cases(["onnx", "program"], quick=["onnx"]))
def test_a_decoder_after_an_encoder_is_searched(to):
    """The keys of the encoder are repeated once, and stay with their row."""
    model, folder = exported("t5", to)
    generator = OnnxGenerator(folder) if to == "onnx" else ProgramGenerator(folder, trust=True)
    _check(generator, model, prompts(), length_penalty=0.5)
