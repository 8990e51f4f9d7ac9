"""A model over files is called as the exported one, and every keyword of `model.generate` does the same."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
import transformers
from transformers import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList, SuppressTokensLogitsProcessor

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.flatten.runtimes import needs_runtime
from tests.transformers_versions import needs_transformers
from yobx_flatten import InvalidArgumentError, Sampling, export_folder, open_generator, open_model
from yobx_flatten.generate.stand_ins import FileCache
from yobx_flatten.huggingface.cache_names import cache_of, installed_name
from yobx_flatten.model_folder.pieces.vision_language import grid_image
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow

with contextlib.suppress(ImportError):  # torchao, which both import, registers classes
    import executorch.exir  # noqa: F401
    import transformers.quantizers.auto

PICTURE = 3
NAMES = ["llama", "gemma3_text", "t5", "whisper", "qwen2_vl", "gemma3"]


def given(model, name: str) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(5)
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 100, generator=seeded)}
    ids = torch.randint(4, 258, (2, 16), generator=seeded)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    pictures = {}
    if name == "t5":  # encoders are padded on the right
        mask = mask.flip(1)
    if name == "gemma3":
        ids[:, 4:8] = PICTURE
        pictures = {"pixel_values": torch.randn(2, 3, 32, 32, generator=seeded)}
        pictures["token_type_ids"] = torch.eq(ids, PICTURE).long()
    if name == "qwen2_vl":
        ids[0, 2:8] = ids[1, 5:9] = PICTURE
        made = [grid_image(model, *size) for size in ((2, 3), (1, 4))]
        pictures = {part: torch.cat([picture[part] for picture in made]) for part in made[0]}
        pictures["mm_token_type_ids"] = torch.eq(ids, PICTURE).long()
    return {"input_ids": ids, "attention_mask": mask, **pictures}


def first_row(inputs: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    counts = {"pixel_values": 4 * 6} if name == "qwen2_vl" else {}
    return {part: value[: counts.get(part, 1)] for part, value in inputs.items()}


class Kept:
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.seen.append("end")


def _ten(**options):
    return lambda first: {"max_new_tokens": 14, **options}


def _drawn(**options):
    return _ten(do_sample=True, **options)


# by name: takes five tokens that the model generates, and returns the keywords
KEYWORDS = {
    "do_sample": _ten(do_sample=False),
    "temperature": _drawn(temperature=0.7),
    "top_p": _drawn(top_p=0.8),
    "top_k": _drawn(top_k=9),
    "min_p": _drawn(min_p=0.1),
    "max_length": lambda first: {"max_length": 24},
    "eos_token_id": lambda first: {"eos_token_id": first[2], "max_new_tokens": 14},
    "streamer": _ten(streamer=Kept),
    "logits_processor": lambda first: {
        "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor(first)]),
        "max_new_tokens": 14,
    },
    "stopping_criteria": _ten(stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0.0)])),
    "generation_config": lambda first: {"generation_config": {"max_new_tokens": 7, "do_sample": True, "top_k": 5}},
    "num_return_sequences": _drawn(num_return_sequences=3),
    "repetition_penalty": _ten(repetition_penalty=1.5),
    "num_beams": _ten(num_beams=3, num_return_sequences=2),
    "beams that are drawn": _drawn(num_beams=3),
    "prompt_lookup_num_tokens": lambda first: {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24},
    "assistant_model": lambda first: {"assistant_model": True, "max_new_tokens": 24},
    "return_dict_in_generate": _ten(return_dict_in_generate=True, output_scores=True),
    "use_cache": _ten(use_cache=False),
    "guidance_scale": _ten(guidance_scale=1.5),
    "prefix_allowed_tokens_fn": _ten(prefix_allowed_tokens_fn=lambda row, tokens: [5, 6, 7, 8 + row]),
}
# of one row only
ONE_ROW = ("streamer", "prompt_lookup_num_tokens", "assistant_model", "guidance_scale")


def same_tokens(name, model, files, given, assistant):
    first = model.generate(**given, do_sample=False, max_new_tokens=14)[0, -5:].tolist()
    results = []
    for door in (model, files):
        options = KEYWORDS[name](first)
        if "streamer" in options:
            options["streamer"] = Kept()
        if "assistant_model" in options:
            options["assistant_model"] = assistant
        if "generation_config" in options:
            stated = {**model.generation_config.to_dict(), **options["generation_config"]}
            options["generation_config"] = transformers.GenerationConfig.from_dict(stated)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            found = door.generate(**given, **options)
        tokens = found if isinstance(found, torch.Tensor) else found["sequences"]
        results.append((tokens.tolist(), options["streamer"].seen if "streamer" in options else None))
    return results


def seeded_tokens(doors, *given, **options):
    found = []
    for door in doors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(door.generate(*given, **options).tolist())
    return found


@pytest.fixture(scope="module", params=cases(NAMES, quick=["llama"]))
def pair(request):
    model, folder = exported(request.param)
    return request.param, model, open_model(folder, threads=1)


# what the model itself refuses, or has no meaning: Whisper's own loop, and guidance without a prompt of text
UNSUPPORTED = {(name, "guidance_scale") for name in ("whisper", "t5", "qwen2_vl")}


@pytest.mark.parametrize("keyword", list(KEYWORDS))
def test_a_keyword_gives_the_tokens_of_the_model(pair, keyword):
    name, model, files = pair
    if (name, keyword) in UNSUPPORTED:
        pytest.skip("generate() of the model itself raises")
    inputs = given(model, name)
    inputs = first_row(inputs, name) if keyword in ONE_ROW else inputs
    expected, found = same_tokens(keyword, model, files, inputs, small_model(name, seed=1))
    assert found == expected


def test_a_generator_takes_the_same_keywords(pair):
    name, model, files = pair
    generator = open_generator(exported(name)[1], threads=1)
    inputs = {part: value for part, value in given(model, name).items() if "type_ids" not in part}
    options = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2, "max_new_tokens": 9}
    of_files, of_generator = seeded_tokens((files, generator), **inputs, **options)
    assert of_files == of_generator


def test_logits_of_a_padded_call_and_of_a_further_one_are_those_of_the_model_and_the_rest_is_refused():
    model, folder = exported("llama")
    files = open_model(folder, threads=1)
    ids = torch.randint(4, 258, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        wanted, found = model(ids, attention_mask=mask), files(ids, attention_mask=mask)
        assert float((wanted.logits - found.logits)[mask.bool()].abs().max()) < 1e-4
        grown = torch.cat([mask, torch.ones(2, 3).long()], dim=1)
        wanted = model(ids[:, :3], attention_mask=grown, **{installed_name(): cache_of(wanted)})
        found = files(ids[:, :3], attention_mask=grown, **{installed_name(): cache_of(found)})
    assert float((wanted.logits - found.logits).abs().max()) < 1e-4
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        cache = cache_of(model(ids))
    with pytest.raises(InvalidArgumentError, match="4 tokens from another model"):
        files(ids, **{installed_name(): cache})
    with pytest.raises(InvalidArgumentError, match=r"attention_mask has shape \(1, 9\); it must have shape \(1, 4\)"):
        files(ids, attention_mask=torch.ones(1, 9))
    with pytest.raises(InvalidArgumentError, match="Pass all options as keywords"):
        open_generator(folder, threads=1).generate(ids, sampling=Sampling(), top_p=0.9)
    with pytest.raises(InvalidArgumentError, match=r"not meta tensors\. Choose the device"):
        files.to("meta")
    assert files.to("cpu").device.type == "cpu"


def test_new_pictures_after_a_filled_cache_are_refused():
    """The second turn of a chat: text alone continues the cache; a picture would be embedded as text."""
    model, folder = exported("qwen2_vl")
    files, inputs, tokens = open_model(folder, threads=1), {}, []
    for door in (model, files):
        inputs = first_row(given(model, "qwen2_vl"), "qwen2_vl")
        inputs["image_grid_thw"] = inputs["image_grid_thw"][:1]
        first = door.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache, text = copy.deepcopy(cache_of(first)), torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        tokens.append(door.generate(text, **{installed_name(): cache_of(first)}, max_new_tokens=4, do_sample=False))
    assert torch.equal(*tokens)
    shown = text.clone()
    shown[0, -2:] = PICTURE
    new = {**grid_image(model, 1, 2), installed_name(): cache}
    with pytest.raises(InvalidArgumentError, match=r"the cache has 19 tokens.*\n.* generate\(\*\*inputs"):
        files.generate(shown, **new, max_new_tokens=4)
    with pytest.raises(InvalidArgumentError, match="Pass the whole conversation"):
        files(shown[:, 19:], **new)


def test_drafts_are_refused_by_a_file_that_returns_the_last_scores_only(tmp_path):
    model = small_model("llama")
    export_folder(model, tmp_path / "last", logits="last", proof="none")
    files, ids = open_model(tmp_path / "last"), torch.tensor([[7, 8, 9, 10]])
    with pytest.raises(InvalidArgumentError, match='without logits="last"'):
        files.generate(ids, prompt_lookup_num_tokens=3)
    expected = model.generate(ids, repetition_penalty=1.4, max_new_tokens=6).tolist()
    assert files.generate(ids, repetition_penalty=1.4, max_new_tokens=6).tolist() == expected


# in Gemma 3 some layers slide: OpenVINO returns its cache, and writes that of Llama in place, as AOTInductor does both
OTHER_FILES = {
    "program": ("gemma3_text", {"to": "program"}),
    "shared": ("gemma3_text", {"optimize": "onnxruntime"}),
    "openvino": ("gemma3_text", {"target": "openvino"}),
    "openvino in place": ("llama", {"target": "openvino"}),
    "aotinductor": ("gemma3_text", {"target": "aotinductor"}),
    "executorch": ("llama", {"target": "executorch", "bounds": {"batch": 4, "length": 64}}),
}


@pytest.mark.parametrize("to", cases(list(OTHER_FILES), quick=["shared"]))
def test_other_files_do_the_same(to, tmp_path):
    name, how = OTHER_FILES[to]
    runtime = how.get("target")
    needs_runtime(runtime)
    model = small_model(name)
    export_folder(model, tmp_path / "out", proof="none" if runtime != "openvino" else "sample", **how)
    files = open_model(tmp_path / "out", trust=to in ("program", "aotinductor"))
    ids = torch.randint(4, 258, (1, 6), generator=torch.Generator().manual_seed(2))
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        wanted, found = seeded_tokens((model, files), ids, **options, max_new_tokens=20)
        assert found == wanted, options


PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module", params=cases(["llama", "bert", "t5", "gemma3_text"], quick=["llama", "bert", "t5"]))
def called(request):
    model, folder = exported(request.param)
    given = {"input_ids": PROMPT, **({"decoder_input_ids": PROMPT[:, :2]} if request.param == "t5" else {})}
    return model, open_model(folder, threads=1), given


def first(outputs):
    return outputs["logits"] if "logits" in outputs else outputs[0]


# what changes what a model returns, or reads, and is no input of any file
REFUSED = {
    "labels": PROMPT,
    "output_hidden_states": True,
    "output_attentions": True,
    "inputs_embeds": torch.zeros(1, 4, 8),
    "decoder_inputs_embeds": torch.zeros(1, 4, 8),
    "output_router_logits": True,
    "head_mask": torch.ones(2, 4),
    "misspelt": 3,
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_argument_that_files_do_not_take_is_refused_by_name(called, name):
    model, files, given = called
    words = rf"^{name}: the files of this {type(model).__name__} take input_ids"
    with pytest.raises(InvalidArgumentError, match=words):
        files(**given, **{name: REFUSED[name]})
    assert torch.equal(first(files(**given, **{name: None})), first(files(**given)))


def test_its_forward_has_the_parameters_of_the_exported_class(called):
    model, files, given = called
    assert inspect.signature(files.forward) == inspect.signature(model.forward)
    order = list(inspect.signature(model.forward).parameters)[:3]
    values = {**given, "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    if not model.config.is_encoder_decoder and hasattr(model, "lm_head"):
        values["attention_mask"] = torch.ones_like(PROMPT)
    with torch.no_grad():
        wanted = first(model(*(values.get(name) for name in order)))
    assert torch.allclose(first(files(*(values.get(name) for name in order))), wanted, atol=1e-4)
    with pytest.raises(InvalidArgumentError, match=r"\w+ takes input_ids.*; found 60 arguments"):
        files(*[None] * 60)
    with pytest.raises(InvalidArgumentError, match=rf"\w+ takes {order[0]}.*; found {order[0]} twice"):
        files(values[order[0]], **{order[0]: values[order[0]]})
    in_a_tuple = files(**given, use_cache=False, return_dict=False)
    assert isinstance(in_a_tuple, tuple)
    assert torch.equal(in_a_tuple[0], first(files(**given)))


def test_positions_are_taken_or_refused():
    model, folder = exported("t5")
    files = open_model(folder, threads=1)
    given = {"input_ids": PROMPT, "decoder_input_ids": PROMPT[:, :2]}
    counted = torch.tensor([[0, 1]])
    assert torch.equal(files(**given, decoder_position_ids=counted).logits, files(**given).logits)
    with pytest.raises(InvalidArgumentError, match=r"decoder_position_ids: .* counts positions itself, from 0"):
        files(**given, decoder_position_ids=counted + 3)
    model, folder = exported("llama")
    with torch.no_grad():
        wanted = model(PROMPT, position_ids=torch.tensor([[0, 1, 5, 9]])).logits
    found = open_model(folder, threads=1)(PROMPT, position_ids=torch.tensor([[0, 1, 5, 9]])).logits
    assert torch.allclose(found, wanted, atol=1e-4)


@needs_transformers("5.23", "its Trainer takes other arguments")
def test_the_trainer_evaluates_with_a_loss_of_the_caller(tmp_path):
    model, folder = exported("llama")
    ids = torch.randint(4, 200, (4, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def evaluated(of, **how):
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
        return transformers.Trainer(of, args, eval_dataset=rows, **how).evaluate()["eval_loss"]

    files = open_model(folder, threads=1)
    assert evaluated(files, compute_loss_func=loss) == pytest.approx(evaluated(model), abs=1e-4)
    with pytest.raises(InvalidArgumentError, match=r"labels: .* The files return no loss: .*compute_loss_func="):
        evaluated(files)


# OpenVINO writes the cache of Llama in place, onnxruntime where it is optimised for it; a window of Gemma 3 slides
COPIED = {
    "returned": ("llama", {}),
    "sliding": ("gemma3_text", {}),
    "shared": ("llama", {"optimize": "onnxruntime"}),
    "program": ("llama", {"to": "program"}),
    "openvino": ("llama", {"target": "openvino"}),
}


@pytest.mark.parametrize("kind", cases(list(COPIED), quick=["returned", "sliding", "shared"]))
def test_a_prompt_is_read_once_for_several_texts(kind, tmp_path):
    name, how = COPIED[kind]
    if "target" in how:
        pytest.importorskip("openvino")
        model, folder = small_model(name), tmp_path / "out"
        export_folder(model, folder, proof="none", **how)
    else:
        model, folder = exported(name, **how)
    files = open_model(folder, threads=1, trust=kind == "program")
    prompt = torch.randint(4, 200, (1, 12), generator=torch.Generator().manual_seed(1))  # longer than the window
    more = [torch.tensor([[11, 9, 4]]), torch.tensor([[12]]), torch.tensor([[13, 5]])]

    def answers(of, copied):
        with torch.no_grad():
            prefix = cache_of(of(prompt, use_cache=True))
            caches = [how(prefix) for how in copied] + [prefix]
            return [
                of.generate(
                    torch.cat([prompt, text], dim=1), **{installed_name(): cache}, max_new_tokens=8, do_sample=False
                ).tolist()
                for text, cache in zip(more, caches, strict=True)
            ]

    wanted = answers(model, [copy.deepcopy, copy.deepcopy])
    assert answers(files, [copy.deepcopy, lambda cache: copy.deepcopy([cache])[0]]) == wanted
    assert answers(files, [copy.copy, copy.deepcopy]) == wanted


def test_what_cannot_be_stored_and_a_cache_that_keeps_something_else_are_refused():
    files = open_model(exported("llama")[1], threads=1)
    with pytest.raises(InvalidArgumentError, match=r"cannot be pickled: .* copy\.deepcopy\(cache\) works"):
        pickle.dumps(cache_of(files(PROMPT)))
    for how in (pickle.dumps, copy.deepcopy):
        with pytest.raises(InvalidArgumentError, match=r"Open them again: open_model\(folder\)"):
            how(files)
    for kind in ("quantized", "paged"):
        with pytest.raises(InvalidArgumentError, match=rf"cache_implementation='{kind}': exported files have"):
            files.generate(PROMPT, max_new_tokens=3, cache_implementation=kind)
    numbers = torch.zeros(1, 2, 3, 4)
    for cache, kind in (
        (type("Own", (transformers.DynamicCache,), {})(), "Own"),
        ([{"key": numbers, "value": numbers}], "list"),
    ):
        words = rf"The cache is .*{kind}.*, but exported files keep .* Pass DynamicCache\(\), or no c"
        with pytest.raises(InvalidArgumentError, match=words):
            files(PROMPT, **{installed_name(): cache})


@pytest.mark.parametrize("asked", ["static", "offloaded", "offloaded_static", "dynamic", "stated"])
@pytest.mark.parametrize("name", cases(["llama", "gemma3_text", "t5"], quick=["llama"]))
def test_a_cache_of_any_kind_is_that_of_the_files(name, asked):
    model, folder = exported(name)
    files = open_model(folder, threads=1)
    wanted = model.generate(PROMPT, max_new_tokens=12, do_sample=False).tolist()
    if asked == "stated":
        files.generation_config.cache_implementation = "static"
    options = {} if asked == "stated" else {"cache_implementation": asked}
    assert files.generate(PROMPT, max_new_tokens=12, do_sample=False, **options).tolist() == wanted


EMPTY = {
    "static": lambda config: transformers.StaticCache(config, max_cache_len=40),
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "without layers": lambda config: transformers.DynamicCache(),
}


@pytest.mark.parametrize("kind", list(EMPTY))
@pytest.mark.parametrize("name", cases(["llama", "gemma3_text"], quick=["llama"]))
def test_a_caller_goes_on_with_the_empty_cache_that_was_passed(name, kind):
    model, folder = exported(name)
    files, scores = open_model(folder, threads=1), []
    for of in (model, files):
        cache = EMPTY[kind](model.config)
        with torch.no_grad():
            scores.append(
                [of(ids, **{installed_name(): cache}).logits for ids in (PROMPT, PROMPT[:, :1], PROMPT[:, 1:3])]
            )
        assert int(cache.get_seq_length()) == 7
    assert isinstance(cache, FileCache)
    for wanted, found in zip(*scores, strict=True):
        assert torch.allclose(wanted, found, atol=1e-4)


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "static"])
def test_a_model_that_asks_for_another_cache_is_exported(kind, tmp_path):
    model = small_model("llama")
    wanted = model.generate(PROMPT, max_new_tokens=6, do_sample=False).tolist()
    model.generation_config.cache_implementation = kind
    report = export_folder(model, tmp_path / "out", proof="sample")
    assert f"without cache_implementation={kind!r}" in str(report)
    files = open_model(tmp_path / "out", threads=1)
    assert files.generate(PROMPT, max_new_tokens=6, do_sample=False).tolist() == wanted
    assert model.generation_config.cache_implementation == kind


@needs_transformers("5.23", "infinite numbers have no tag")
def test_a_folder_with_infinite_settings_opens(tmp_path):
    """transformers writes `{"__float__": "Infinity"}`; the files generate the model's tokens."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    states = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
    config = transformers.BambaConfig(**sizes, **heads, **states, attn_layer_indices=[1])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert max(model.config.time_step_limit) == float("inf")
    export_folder(model, tmp_path / "out", proof="sample")
    files = open_model(tmp_path / "out", threads=1)
    assert list(files.config.time_step_limit) == list(model.config.time_step_limit)
    found = files.generate(PROMPT, max_new_tokens=6, do_sample=False).tolist()
    assert found == model.generate(PROMPT, max_new_tokens=6, do_sample=False).tolist()
