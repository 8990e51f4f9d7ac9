"""Models of half precision read pictures and sound of their own type."""

import pytest
import torch

from yobx_flatten import export_folder
from yobx_flatten.model_folder.pieces.tasks import pieces_for
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.private_names.of_torch import pytree

KINDS = ["whisper", "moonshine", "vit", "clip", "wav2vec2", "trocr", "llava", "qwen2_vl", "t5"]


@pytest.mark.parametrize("name", KINDS)
def test_inputs_have_the_type_of_the_weights(name):
    """In every file of a folder: a model in float16 stops at numbers of float32."""
    _, pieces = pieces_for(small_model(name).half(), "auto")
    leaves = [leaf for piece in pieces for leaf in pytree.tree_leaves(dict(piece.kwargs))]
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    assert {leaf.dtype for leaf in floats} <= {torch.float16}


def test_a_whisper_in_float16_becomes_a_folder(tmp_path):
    """It stopped at `Input type (float) and bias type (c10::Half)`."""
    done = export_folder(small_model("whisper").half(), tmp_path / "out", proof="sample")
    assert done.verified.ok
