"""onnxruntime-genai opens a folder as it is, and generates what the model generates."""

import json
import shutil

import pytest
import torch

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from matrix.genai_cases import generate
from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.transformers_versions import is_older_than

TOKENS = 30  # with nine of the prompt: several times the small window of eight

# one of each kind; `make genai` runs all that docs/genai.md lists
SHARED = ["llama", "mistral", "gemma3_text", "gpt2", "qwen3_moe"]
GROWING = ["llama"]


def _check(name: str, optimize: str | None) -> dict:
    model, folder = exported(name, optimize=optimize)
    prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
    found = generate(folder, prompt[0].tolist(), TOKENS)
    ended = int(wanted[0, -1]) == model.config.eos_token_id  # a token that the library leaves away
    assert found == wanted[0].tolist()[: -1 if ended and len(found) < wanted.shape[1] else None]
    assert len(found) > prompt.shape[1] + 8  # past the window
    return json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(SHARED, quick=["mistral", "gpt2"]))
def test_a_cache_in_one_memory_generates_as_the_model_does(name):
    """Past the window of layers that slide, which hold all tokens in such a file."""
    if name == "qwen3_moe" and is_older_than("5.0"):
        pytest.skip("transformers before 5.0 loops over the experts that are hit, which no trace can follow")
    assert _check(name, "onnxruntime")["past_present_share_buffer"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_operators_of_onnx_generate_as_the_model_does(name):
    assert _check(name, None)["past_present_share_buffer"] is False


def _generator(folder, **options):
    import onnxruntime_genai as genai

    params = genai.GeneratorParams(model := genai.Model(str(folder)))
    params.set_search_options(do_sample=False, **options)
    return genai.Generator(model, params)


@pytest.mark.slow
@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_rows_that_the_library_pads_on_the_right_are_those_of_the_model(optimize):
    """The model has the padding on the left; new tokens of the short row follow its padding in the library's cache."""
    model, folder = exported("llama", optimize=optimize)
    prompt = torch.randint(4, 259, (2, 9), generator=torch.Generator().manual_seed(3))
    left, mask = prompt.clone(), torch.ones_like(prompt)
    left[0, :3] = mask[0, :3] = 0
    right = left.clone()
    right[0] = left[0].roll(-3)
    wanted = model.generate(left, attention_mask=mask, max_new_tokens=11, do_sample=False)
    generator = _generator(folder, batch_size=2, max_length=20)
    generator.append_tokens(right.to(torch.int32).numpy())
    while not generator.is_done():
        generator.generate_next_token()
    for row, expected in enumerate(wanted[:, 9:].tolist()):
        found = [int(token) for token in generator.get_sequence(row)][9:]
        assert found[: len(expected)] == expected[: len(found)]
        assert len(found) > 8


@pytest.mark.slow
@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_a_second_turn_goes_on_after_an_end(optimize, tmp_path):
    """Several tokens after those of the first turn, which ended with the token that the folder names."""
    model, folder = exported("llama", optimize=optimize)
    first, second = torch.randint(4, 259, (2, 1, 6), generator=torch.Generator().manual_seed(3))
    options = {"do_sample": False, "eos_token_id": None}
    begun = model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=5, **options)
    copied = shutil.copytree(folder, tmp_path / "copied")
    config = json.loads((copied / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["eos_token_id"] = int(begun[0, -1])
    (copied / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = _generator(copied, max_length=40)
    generator.append_tokens(first.to(torch.int32).numpy())
    while not generator.is_done():
        generator.generate_next_token()
    generator.append_tokens(second.to(torch.int32).numpy())
    read = torch.cat([begun[:, :-1], second], dim=1)
    assert [int(token) for token in generator.get_sequence(0)] == read[0].tolist()
    wanted = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=3, **options)
    for _ in range(3):
        generator.generate_next_token()
    assert [int(token) for token in generator.get_sequence(0)] == wanted[0].tolist()
