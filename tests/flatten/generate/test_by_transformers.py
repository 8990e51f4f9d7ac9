"""Every keyword of `model.generate` does the same with files: the loop is transformers' own, over their cache."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.cases import cases
from tests.flatten.generate.keywords import KEYWORDS, ONE_ROW, same_tokens
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import open_model
from yobx_flatten.model_folder.grid_images import grid_image
from yobx_flatten.model_folder.tiny_models import small_model

pytestmark = pytest.mark.slow

PICTURE = 3
NAMES = ["llama", "gemma3_text", "t5", "whisper", "qwen2_vl", "gemma3"]


def given(model, name: str) -> dict[str, torch.Tensor]:
    """Two rows of a model's inputs, of which one is padded, and the second half of another picture or sound."""
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
    """The first row alone; of patches, those of its picture."""
    counts = {"pixel_values": 4 * 6} if name == "qwen2_vl" else {}
    return {part: value[: counts.get(part, 1)] for part, value in inputs.items()}


@pytest.fixture(scope="module", params=cases(NAMES, quick=["llama"]))
def pair(request):
    """A small model, and its files as a model of transformers."""
    model, folder = exported(request.param)
    return request.param, model, open_model(folder, threads=1)


# what the model itself refuses, or has no meaning: Whisper's own loop, and guidance without a prompt of text
UNSUPPORTED = {("whisper", "guidance_scale"), ("t5", "guidance_scale")}


@pytest.mark.parametrize("keyword", list(KEYWORDS))
def test_a_keyword_gives_the_tokens_of_the_model(pair, keyword):
    """The same tokens, and samples of the same seed; a streamer is given the same."""
    name, model, files = pair
    if (name, keyword) in UNSUPPORTED:
        pytest.skip("generate() of the model itself raises")
    inputs = given(model, name)
    inputs = first_row(inputs, name) if keyword in ONE_ROW else inputs
    expected, found = same_tokens(keyword, (model, files), inputs, small_model(name, seed=1))
    assert found == expected
