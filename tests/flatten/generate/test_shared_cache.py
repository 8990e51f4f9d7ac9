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


@pytest.mark.slow
def test_two_streams_have_memory_of_their_own():
    """Read in turns, they yield the columns of `generate`."""
    generator = OnnxGenerator(exported("llama", optimize="onnxruntime")[1], threads=1)
    whole = generator.generate(**prompts(), max_new_tokens=6)[:, 9:]
    streams = [generator.stream(**prompts(), max_new_tokens=6) for _ in range(2)]
    pairs = list(zip(*streams, strict=True))
    assert [first.tolist() for first, _ in pairs] == whole.T.tolist()
    assert [second.tolist() for _, second in pairs] == whole.T.tolist()
