"""Generation in one cache that is bound once."""

import json

import pytest

from tests.flatten.generate.test_generator import TOKENS, expected, prompts
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import OnnxGenerator
from yobx_flatten.model_folder.manifest import read_manifest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padded_rows_go_past_the_window_as_the_model_does(name):
    """Layers that slide keep all tokens in such a folder, and their mask leaves out those outside of the window."""
    model, folder = exported(name, optimize="onnxruntime")
    assert read_manifest(folder).cache == "shared"
    assert json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]["past_present_share_buffer"]
    generator = OnnxGenerator(folder, threads=1)
    assert len(generator.parts.decoder.shared) == len(generator.parts.decoder.slots)
    found = generator.generate(**prompts(), max_new_tokens=TOKENS)
    assert found.tolist() == expected(model, prompts()).tolist()
