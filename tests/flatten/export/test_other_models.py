"""Models other than language models: their outputs reach every runtime under the names of their fields."""

import functools
import importlib
import os
import shutil

import pytest
import torch
from torch.export import Dim
from transformers import CLIPConfig, CLIPModel, DetrConfig, DetrForObjectDetection, ResNetConfig

from yobx_flatten import Case, export_program, register_flattening_functions
from yobx_flatten.runners.open import open_runner

SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "aotinductor": ".pt2", "executorch": ".pte"}
SLOW = pytest.mark.slow
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),  # between them is one block that attends
        up_block_types=("UpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return model, lambda rows: {
        "sample": torch.randn(rows, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(rows, 5, 8),
    }


def _diffusion_transformer():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return model, lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "encoder_hidden_states": torch.randn(rows, 5, 16),
        "pooled_projections": torch.randn(rows, 16),
        "timestep": torch.arange(rows),
    }


def _clip():
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 49}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    return model, lambda rows: {
        "input_ids": torch.randint(0, 50, (rows, 7)),
        "pixel_values": torch.randn(rows, 3, 16, 16),
        "attention_mask": torch.ones(rows, 7, dtype=torch.int64),
    }


def _detection():
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8] * 2, depths=[1] * 2, out_features=["stage2"])
    sizes = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
        **sizes,
    )
    return DetrForObjectDetection(config), lambda rows: {"pixel_values": torch.randn(rows, 3, 32, 32)}


def _segmentation():
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    return model, lambda rows: {"input": torch.randn(rows, 3, 64, 64)}


def _classifier_of_timm():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=5)
    return model, lambda rows: {"x": torch.randn(rows, 3, 32, 32)}


# fields of the output, in the order of its class
MODELS = {
    "unet": (_unet, ["sample"]),
    "diffusion transformer": (_diffusion_transformer, ["sample"]),
    "clip": (_clip, ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]),
    "detection": (_detection, ["logits", "pred_boxes", "last_hidden_state", "encoder_last_hidden_state"]),
    "segmentation": (_segmentation, ["out"]),
    "classifier of timm": (_classifier_of_timm, ["output"]),
}
# what is not installed everywhere; torchvision raises a RuntimeError next to a torch that it was not compiled for
NEEDS = {
    "unet": "diffusers",
    "diffusion transformer": "diffusers",
    "segmentation": "torchvision",
    "classifier of timm": "timm",
}


def _marks(name, runtime):
    if runtime in ("aotinductor", "executorch"):  # a model compiles for a minute
        return SLOW, pytest.mark.extended
    return pytest.mark.extended if name in ("unet", "detection") else ()


PAIRS = [
    pytest.param(name, runtime, id=f"{name}, {runtime}", marks=_marks(name, runtime))
    for name in MODELS
    for runtime in SUFFIX
]


@pytest.fixture(scope="module")
def exported():
    """By name: the model, what makes its inputs, names of outputs, and the program, replayed with 2 and 5 rows."""

    @functools.cache
    def export(name):
        make, fields = MODELS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, inputs = make()
            model.eval()
            shapes = {key: {0: Dim.AUTO(max=8)} if value.ndim else None for key, value in inputs(2).items()}
            cases = [Case(f"{rows} rows", (), inputs(rows)) for rows in (2, 5)]
            with register_flattening_functions(patch_diffusers=NEEDS.get(name) == "diffusers"):
                program = export_program(model, (), inputs(3), dynamic_shapes=shapes, cases=cases)
        return model, inputs, fields, program

    return export


@pytest.mark.parametrize(("name", "runtime"), PAIRS)
def test_outputs_reach_the_runtime(exported, name, runtime, tmp_path):
    if name in NEEDS:
        try:
            importlib.import_module(NEEDS[name])
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{NEEDS[name]} cannot be imported: {error}")
    if runtime in ("openvino", "executorch"):
        pytest.importorskip(runtime)
    if runtime == "aotinductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    model, inputs, fields, program = exported(name)
    path = tmp_path / f"model{SUFFIX[runtime]}"
    with register_flattening_functions(patch_diffusers=NEEDS.get(name) == "diffusers"):
        report = getattr(program, f"to_{runtime}")(path)
    assert [case.error for case in report.cases] == [None, None, None]

    runner = open_runner(path, **{"trust": True} if runtime == "aotinductor" else {})
    torch.manual_seed(1)
    given = inputs(4)
    found = runner.run(given)
    with torch.no_grad():
        expected = model(**given)
    expected = {"output": expected} if isinstance(expected, torch.Tensor) else expected
    assert [output.rpartition(".")[2] for output in found][: len(fields)] == fields
    for field, tensor in zip(fields, found.values(), strict=False):
        torch.testing.assert_close(tensor, expected[field], atol=1e-4, rtol=0)
