"""Export with proof: names, replay, report, what does not fit, and outputs of models other than language models."""

import functools
import importlib
import importlib.util
import inspect

import onnx
import onnxruntime
import pytest
import torch
import transformers
from torch.export import Dim

from tests.cache_words import WORD, cache_of
from tests.flatten.runtimes import needs_runtime
from tests.models import WINDOW, make_model, new_cache
from tests.modules import module_class
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, register_flattening_functions
from yobx_flatten.errors import NotRegisteredError, ReplayError
from yobx_flatten.export import Case, export_onnx, export_program
from yobx_flatten.runners.open import open_runner

pytestmark = pytest.mark.slow
Scale = module_class("Scale", lambda self, x, more=None: {"y": x * 2 + more["z"][0].sum(), "z": more["z"]})


def _scale_inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
    return (torch.arange(rows * 3.0).reshape(rows, 3),), {"more": {"z": [torch.ones(4)]}}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "mistral.onnx"
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes(batch=1, past=5, new=1))
    return export_onnx(make_model("mistral"), (), {**kwargs, "use_cache": True}, path)


def test_the_report_says_what_was_replayed_and_how_far_it_differs(mistral):
    report = mistral.report
    assert report.ok
    assert report.max_difference < 1e-5
    assert [case.runtime for case in report.cases] == ["torch.export"] * 6 + ["onnxruntime"] * 6
    assert {case.steps for case in report.cases} == {3}
    names = " ".join(case.case for case in report.cases)
    assert f"past {WINDOW // 2}" in names
    assert f"past {WINDOW}," in names
    assert f"past {2 * WINDOW + 3}" in names
    assert "padded" in names
    assert report.onnx_bytes == mistral.path.stat().st_size
    outputs = {"logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"}
    assert set(report.cases[0].differences) == {*outputs, "present.length"}  # of the program
    assert set(report.cases[-1].differences) == outputs  # of the file
    lines = str(report).splitlines()
    assert lines[0].startswith("MistralForCausalLM: exported in ")
    assert lines[1].split() == ["case", "runtime", "steps", "max", "difference", "worst", "output"]
    assert sum("onnxruntime" in line for line in lines) == 6


def test_the_file_of_a_model_that_slides_has_the_inputs_that_tools_feed_and_varying_sizes(mistral, tmp_path):
    names = ["input_ids", "attention_mask", "position_ids"]
    names += [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert mistral.report.input_names == names
    graph = onnx.load(mistral.path).graph
    inputs = {given.name: given.type.tensor_type for given in graph.input}
    assert list(inputs) == [*names, "num_logits_to_keep"]  # "use_cache" is none
    assert "num_logits_to_keep" in {tensor.name for tensor in graph.initializer}  # so a call need not pass it
    keys = inputs["past_key_values.0.key"].shape.dim
    assert [bool(dim.dim_param) for dim in keys] == [True, False, True, False]
    assert [result.name for result in graph.output] == mistral.report.output_names
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes())
    bare = {"input_ids": kwargs["input_ids"], WORD: cache_of(kwargs)}
    exported = export_onnx(make_model("mistral"), (), bare, tmp_path / "a.onnx", cases=[], counter_input=True)
    assert exported.report.input_names == ["input_ids", *names[3:], "past_key_values.length"]
    assert "present.length" in exported.report.output_names


def test_a_cache_that_does_not_fit_the_mask_is_refused(mistral):
    """A window holds what was seen, up to its size: with a key less the file would compute other scores."""
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes(batch=2, past=3, new=1))
    feeds = {"input_ids": kwargs["input_ids"], "attention_mask": kwargs["attention_mask"]}
    feeds["position_ids"] = torch.full((2, 1), 3)
    for index, layer in enumerate(cache_of(kwargs).layers):
        feeds |= {f"past_key_values.{index}.key": layer.keys, f"past_key_values.{index}.value": layer.values}
    runner = open_runner(mistral.path)
    with torch.no_grad():
        expected = make_model("mistral")(**kwargs).logits
    torch.testing.assert_close(runner.run(feeds)["logits"], expected, atol=1e-5, rtol=1e-5)
    shorter = {name: value[:, :, 1:] if name.startswith("past") else value for name, value in feeds.items()}
    with pytest.raises(ReplayError, match=r"holds 2 tokens, but .* needs 3 tokens, since attention_mask has 3 columns"):
        runner.run(shorter)


def test_a_padded_row_past_the_window_needs_no_counter_and_no_more_keys_than_the_window(mistral):
    """Fed as onnxruntime-genai does, with positions that do not count padding: the scores of the eager model."""
    model, session = make_model("mistral"), onnxruntime.InferenceSession(mistral.path)
    tokens = torch.randint(3, 90, (2, 2 * WINDOW + 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=model.config)
    own = {name: torch.zeros(2, 2, 0, 8) for name in mistral.report.input_names[3:]}
    start = 0
    for end in (5, 2 * WINDOW + 1, 2 * WINDOW + 2, 2 * WINDOW + 6):
        read = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end]}
        read["position_ids"] = positions[:, start:end]
        with torch.no_grad():
            expected = model(**read, **{WORD: cache}, use_cache=True).logits
        feeds = {name: value.contiguous().numpy() for name, value in {**read, **own}.items()}
        found = dict(zip(mistral.report.output_names, map(torch.from_numpy, session.run(None, feeds)), strict=True))
        seen = mask[:, start:end].bool()
        torch.testing.assert_close(found["logits"][seen], expected[seen], atol=1e-4, rtol=1e-4)
        own = {f"past_key_values{k.removeprefix('present')}": v for k, v in found.items() if k != "logits"}
        assert own["past_key_values.0.key"].shape[2] == min(end, WINDOW - 1)
        start = end


def test_what_the_helper_returns_can_be_called_anywhere(mistral):
    model, sizes = make_model("mistral"), DecodeSizes(batch=3, past=WINDOW + 2, new=2)
    with torch.no_grad():
        found = mistral(**decode_inputs(model, sizes), use_cache=True)
        expected = model(**decode_inputs(model, sizes), use_cache=True)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert type(cache_of(found)).__name__ == "DynamicCache"
    refused = r"(?s)DynamicCache.*register_flattening_functions\(patch_transformers"
    with pytest.raises(NotRegisteredError, match=refused):
        mistral.program.module()(**decode_inputs(model, sizes), use_cache=True)


def test_plain_torch_onnx_export_works_inside_the_block(tmp_path):
    model, kwargs = make_model("gemma2"), decode_inputs(make_model("gemma2"), DecodeSizes())
    shapes = dynamic_shapes(kwargs)
    with register_flattening_functions(patch_transformers=True):
        program = torch.onnx.export(model, (), kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    program.save(tmp_path / "gemma2.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "gemma2.onnx", providers=["CPUExecutionProvider"])
    case = decode_inputs(model, DecodeSizes(batch=3, past=2 * WINDOW, new=1))
    leaves = [leaf for layer in cache_of(case).layers for leaf in (layer.keys, layer.values)]
    given = zip(session.get_inputs(), [case["input_ids"], case["attention_mask"], *leaves], strict=True)
    found = session.run(None, {port.name: leaf.contiguous().numpy() for port, leaf in given})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(**case).logits, atol=1e-5, rtol=1e-5)


def test_any_module_with_nested_inputs_and_other_sizes_that_are_not_replayed_are_said(tmp_path):
    (args, kwargs), (other_args, other_kwargs) = _scale_inputs(2), _scale_inputs(5)
    cases = [Case("five rows", other_args, other_kwargs)]
    exported = export_onnx(Scale(), args, kwargs, tmp_path / "scale.onnx", cases=cases)
    assert exported.report.input_names == ["x", "more.z.0"]
    assert exported.report.output_names == ["y", "z.0"]
    assert [case.case for case in exported.report.cases] == ["the example", "five rows"] * 2
    assert exported.report.max_difference == 0.0
    assert exported(*other_args, **other_kwargs)["y"][0].tolist() == [4.0, 6.0, 8.0]
    with pytest.raises(ReplayError, match=r"five rows\s+torch\.export\s+0\s+step 0: "):  # refused by a fixed size
        export_program(Scale(), args, kwargs, dynamic_shapes=None, cases=cases)
    args, kwargs = _scale_inputs(1)
    report = export_program(Scale(), args, kwargs).report
    assert "zeros, False and lowest values" in [case.case for case in report.cases]
    assert "x axis 0" in " ".join(report.remarks)
    assert any("sizes of 0 and 1 in the example stay fixed" in remark for remark in report.remarks)


@pytest.mark.parametrize("empty", ["made to grow", "made from the configuration"])
def test_an_empty_cache_as_example_is_replaced_by_a_filled_one(empty):
    model = make_model("gemma2")
    cache = transformers.DynamicCache() if empty == "made to grow" else transformers.DynamicCache(config=model.config)
    ids = torch.randint(3, 90, (1, 4))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), WORD: cache}
    report = export_program(model, (), kwargs, steps=2).report
    assert report.ok
    assert "past_key_values.0.key" in report.input_names
    assert any(f"{WORD} is empty" in remark for remark in report.remarks)


def test_the_example_that_replaces_one_is_not_used_up_by_the_trial(monkeypatch):
    model, seen = make_model("mistral"), []
    forward = type(model).forward

    def watched(self, *args, **kwargs):
        cache = kwargs.get(WORD)
        if cache is not None and not torch.compiler.is_exporting():
            past = kwargs["attention_mask"].shape[1] - kwargs["input_ids"].shape[1]
            seen.append((past, cache.layers[0].cumulative_length))
        return forward(self, *args, **kwargs)

    kwargs = decode_inputs(model, DecodeSizes(batch=1, past=5, new=1))
    watched.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", watched)
    export_program(model, (), kwargs, cases=[], steps=1)
    assert seen
    assert all(counted == past for past, counted in seen)


def test_a_prefill_without_a_cache_is_replayed_in_other_sizes():
    ids = torch.randint(3, 90, (2, 4))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), WORD: None, "use_cache": True}
    report = export_program(make_model("mistral"), (), kwargs).report
    assert report.ok
    assert {case.steps for case in report.cases} == {1}
    assert len(report.cases) == 6
    assert report.input_names == ["input_ids", "attention_mask"]
    assert "present.length" in report.output_names


@pytest.mark.parametrize("room", [32, 12])
def test_a_static_cache_is_exported_and_replayed(room):
    model = make_model("llama")
    like = {"input_ids": None, "attention_mask": None, WORD: new_cache("llama", static=True, room=room)}
    exported = export_program(model, (), decode_inputs(model, DecodeSizes(batch=2, past=5, new=2), like=like), steps=2)
    assert exported.report.ok
    assert len(exported.report.cases) == 4


@pytest.mark.parametrize("positions", [20, 12])
def test_a_model_with_few_learned_positions_is_replayed_within_them(positions):
    """GPT-2 has an embedding for each position; no case asks for one more."""
    sizes = {"vocab_size": 96, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=positions)).eval()
    exported = export_program(model, (), decode_inputs(model, DecodeSizes(batch=2, past=2, new=2)))
    assert exported.report.ok
    assert len(exported.report.cases) == 4


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.exporters") is None, reason="transformers before 5.17 brings no translation"
)
def test_a_mixture_of_experts_is_translated(tmp_path):
    """Experts multiply in groups, by an operator of transformers that torch's exporter does not know."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    report = export_onnx(model, (), decode_inputs(model, DecodeSizes()), tmp_path / "mixtral.onnx", steps=2).report
    assert report.max_difference < 1e-5


SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "aotinductor": ".pt2", "executorch": ".pte"}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _unet():
    from diffusers import UNet2DConditionModel

    blocks = {f"{way.lower()}_block_types": (f"{way}Block2D",) * 2 for way in ("Down", "Up")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8}
    # between the blocks is one that attends
    model = UNet2DConditionModel(sample_size=8, **sizes, **blocks, attention_head_dim=4, norm_num_groups=4)
    return model, lambda rows: {
        "sample": torch.randn(rows, 4, 8, 8),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(rows, 5, 8),
    }


def _diffusion_transformer():
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    heads = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    widths = {"joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 16}
    return SD3Transformer2DModel(**sizes, **heads, **widths), lambda rows: {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "encoder_hidden_states": torch.randn(rows, 5, 16),
        "pooled_projections": torch.randn(rows, 16),
        "timestep": torch.arange(rows),
    }


def _clip():
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 49}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    return model, lambda rows: {
        "input_ids": torch.randint(0, 50, (rows, 7)),
        "pixel_values": torch.randn(rows, 3, 16, 16),
        "attention_mask": torch.ones(rows, 7, dtype=torch.int64),
    }


def _detection():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 2, depths=[1] * 2, out_features=["stage2"]
    )
    parts = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5, "num_labels": 3}
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}
    model = transformers.DetrForObjectDetection(transformers.DetrConfig(**own, **sizes, **parts))
    return model, lambda rows: {"pixel_values": torch.randn(rows, 3, 32, 32)}


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
NEEDS = dict.fromkeys(("unet", "diffusion transformer"), "diffusers")
NEEDS |= {"segmentation": "torchvision", "classifier of timm": "timm"}


def _marks(name, runtime):
    if runtime in ("aotinductor", "executorch"):  # a model compiles for a minute
        return pytest.mark.slow, pytest.mark.extended
    return pytest.mark.extended if name in ("unet", "detection") else ()


PAIRS = [
    pytest.param(name, runtime, id=f"{name}, {runtime}", marks=_marks(name, runtime))
    for name in MODELS
    for runtime in SUFFIX
]


@pytest.fixture(scope="module")
def exported():
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
    needs_runtime(runtime)
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
