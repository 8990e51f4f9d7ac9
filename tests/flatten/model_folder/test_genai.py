"""onnxruntime-genai opens a folder as it is, and generates what the model generates."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from matrix.genai_cases import generate
from tests.flatten.model_folder.exported_folders import exported

TOKENS = 30  # with nine of the prompt: several times the small window of eight

# one of each kind; `make genai` runs all that docs/genai.md lists
SHARED = ["llama", "mistral", "gemma3_text", "gpt2", "qwen3_moe"]
GROWING = ["llama"]


def _check(name: str, optimize: str | None) -> dict:
    """Compare the tokens; return what the folder tells the library."""
    model, folder = exported(name, optimize=optimize)
    prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
    found = generate(folder, prompt[0].tolist(), TOKENS)
    ended = int(wanted[0, -1]) == model.config.eos_token_id  # a token that the library leaves away
    assert found == wanted[0].tolist()[: -1 if ended and len(found) < wanted.shape[1] else None]
    assert len(found) > prompt.shape[1] + 8  # past the window
    return json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_a_cache_in_one_memory_generates_as_the_model_does(name):
    """Past the window of layers that slide, which hold all tokens in such a file."""
    assert _check(name, "onnxruntime")["past_present_share_buffer"] is True


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_operators_of_onnx_generate_as_the_model_does(name):
    """The cache grows with every token."""
    assert _check(name, None)["past_present_share_buffer"] is False
