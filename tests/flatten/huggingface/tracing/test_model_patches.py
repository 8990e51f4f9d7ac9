"""transformers' own patches: in force during a trace, for imported models only, and put back."""

import copy
import importlib.util

import pytest
import torch
from torch.export import Dim, export

from matrix.media import PictureEncoder, picture_of
from matrix.models import make_model
from tests import fresh_process
from yobx_flatten import register_flattening_functions
from yobx_flatten.huggingface.tracing.support import TRANSFORMERS_TRACING, upstream_replacements

# of the package: to find a module in it imports the package, which imports 40 models in 5.17
HAS_EXPORTERS = importlib.util.find_spec("transformers.exporters") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_EXPORTERS, reason="transformers before 5.17 has no exporters"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def qwen2_vl():
    return make_model("image:qwen2_vl")


def pictures(model, seed):
    return picture_of(model, 2, torch.Generator().manual_seed(seed))[0]


def export_encoder(model, made):
    shapes = {name: dict.fromkeys(range(given.dim()), Dim.AUTO) for name, given in made.items()}
    with torch.no_grad():
        return export(PictureEncoder(model), (copy.deepcopy(made),), dynamic_shapes=(shapes,))


@pytest.mark.parametrize("name", ["qwen2_vl", "glm_ocr"])
def test_an_encoder_that_loops_over_pictures_is_exported_inside_a_block(name):
    """Norms of queries and keys are computed; upstream's version leaves them out."""
    model = make_model(f"image:{name}")
    attention = model.model.visual.blocks[0].attn
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm) if name == "glm_ocr" else ():
            norm.weight.uniform_(0.5, 2.0)
    with register_flattening_functions(patch_transformers=True):
        program = export_encoder(model, pictures(model, 1))
    other = pictures(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(other), PictureEncoder(model)(other), rtol=1e-4, atol=1e-5)


def test_a_picture_does_not_look_at_another_one():
    """Pictures of 2 and 6 patches, as the loop of the original computes them one after the other."""
    attention = make_model("image:glm_ocr").model.visual.blocks[0].attn
    make = next(make for target, _, make in upstream_replacements() if target is type(attention))
    hidden, ends = torch.randn(8, attention.dim), torch.tensor([0, 2, 8], dtype=torch.int32)
    angle = torch.rand(8, attention.head_dim)
    positions = (angle.cos(), angle.sin())
    with torch.no_grad():
        expected = attention(hidden, ends, position_embeddings=positions)
        found = make(type(attention).forward)(attention, hidden, ends, position_embeddings=positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_same_encoder_stops_a_trace_without_them(qwen2_vl):
    """When this fails, transformers no longer needs the patch."""
    with pytest.raises(torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
        export_encoder(qwen2_vl, pictures(qwen2_vl, 1))


def test_the_original_comes_back_when_a_trace_ends_or_fails_and_caches_and_torch_are_left_alone(qwen2_vl):
    """Upstream would turn sliding layers into full ones, and replace a function of torch for all threads."""
    attention = type(qwen2_vl.model.visual.blocks[0].attn)
    found = vars(attention)["forward"]
    with register_flattening_functions(patch_transformers=True):
        assert vars(attention)["forward"] is found
    with TRANSFORMERS_TRACING.traceable():
        assert vars(attention)["forward"] is not found
        with TRANSFORMERS_TRACING.traceable():
            pass
        assert vars(attention)["forward"] is not found
    assert vars(attention)["forward"] is found
    with pytest.raises(ZeroDivisionError), TRANSFORMERS_TRACING.traceable():
        _ = 1 / 0
    assert vars(attention)["forward"] is found
    owners = [target for target, _, _ in upstream_replacements()]
    assert owners
    names = {getattr(owner, "__module__", None) or owner.__name__ for owner in owners}
    assert all(name.startswith("transformers.models.") for name in names)


def test_nothing_is_imported_for_a_model_that_needs_none():
    """Importing 5.17's exporters takes two seconds."""
    program = (
        "import sys, transformers.models.llama.modeling_llama\n"
        "from yobx_flatten.huggingface.tracing.support import upstream_replacements\n"
        "assert list(upstream_replacements()) == []\n"
        "assert 'transformers.exporters.exporter_dynamo' not in sys.modules\n"
    )
    fresh_process.run("-c", program)
