"""Sizes that the code of a module computes with: right in every size that program and file take, refused in others."""

import math

import onnxruntime
import pytest
import torch
import transformers
from torch.export import Dim

from yobx_flatten import export_onnx, export_program, prove_program

F = torch.nn.functional


def _padded(self, x):
    missing = (4 - x.shape[1] % 4) % 4  # to a multiple, as windows of attention are
    return F.pad(x, (0, missing), value=9.0) if missing > 0 else x * 2


def _padded_upwards(self, x):
    missing = -(-x.shape[1] // 4) * 4 - x.shape[1]
    return x + 5 if missing > 0 else x * 2


# name of a module -> its forward
FORWARDS = {
    "Padded": _padded,
    "PaddedUpwards": _padded_upwards,
    "Remainder": lambda self, x: x + 5 if x.shape[1] % 4 == 1 else x * 2,
    "Either": lambda self, x: x + 5 if x.shape[1] % 2 == 1 or x.shape[0] % 5 == 4 else x * 2,
    "Both": lambda self, x: x + 5 if x.shape[1] % 2 == 0 and x.shape[1] % 4 == 0 else x * 2,
    "Enough": lambda self, x: x * 2 if x.shape[1] // 3 >= 2 else x + 5,
    "Above": lambda self, x: x * 2 if x.shape[1] > 6 else x + 5,
    "Six": lambda self, x: x + 5 if x.shape[1] == 6 else x * 2,
    "UpToNine": lambda self, x: x * 2 if x.shape[1] <= 9 else x * 3,  # as sparse attention does
    "Half": lambda self, x: x[:, : int(x.shape[1] // 2)] * 2,
    "Upwards": lambda self, x: F.interpolate(x[:, None, None], size=(3, math.ceil(x.shape[1] / 4))),
    "Rounded": lambda self, x: x[:, : int(x.shape[1] * 0.5)] * 2,
    "Root": lambda self, x: x.sum(1)[:, None].expand(-1, int(x.shape[1] ** 0.5)) * 1.0,
    "AsFloat": lambda self, x: x / float(x.shape[1]),
    "Branch": lambda self, x: x * 2 if x.shape[1] // 3 == 2 else x * 3,
    "RoundedBranch": lambda self, x: x * 2 if int(x.shape[1] * 0.5) < 5 else x * 3,
    "Pooled": lambda self, x: F.adaptive_avg_pool1d(x[:, None], 2),
    "Factor": lambda self, x: F.interpolate(x[:, None], scale_factor=1.5, mode="linear"),
}


def made(name):
    return type(name, (torch.nn.Module,), {"forward": FORWARDS[name]})()


class Shifted(torch.nn.Module):
    """torch asks whether the part of it is contiguous, which it answers for more than one column."""

    def forward(self, x):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1].clone()
        return shifted * 2


SIZES = (8, 7, 6, 9, 12, 3, 16, 20, 2, 41)


def _same(found, expected):
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_file_gives_the_module_s_numbers_or_stops(kind, tmp_path):
    module = made(kind)
    export_onnx(module, (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sizes.onnx")
    taken = []
    for size in SIZES:
        x = torch.randn(3, size)
        try:
            (found,) = session.run(None, {"x": x.numpy()})
        except Exception:  # whatever onnxruntime raises
            continue
        taken.append(size)
        assert _same(torch.tensor(found), module(x)), size
    assert 8 in taken


def test_a_file_takes_sizes_that_its_program_refuses_and_computes_right(tmp_path):
    """Two columns, of which one is shifted: the program asserts more, and the numbers are those of the module."""
    export_onnx(Shifted(), (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sizes.onnx")
    for size in (2, 3, 9):
        x = torch.randn(3, size)
        (found,) = session.run(None, {"x": x.numpy()})
        assert _same(torch.tensor(found), Shifted()(x)), size


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_program_gives_the_module_s_numbers_or_stops(kind):
    """torch leaves comparisons with rounded numbers out of its programs, which then took every size."""
    module = made(kind)
    exported = export_program(module, (torch.randn(2, 8),))
    taken = []
    for size in SIZES:
        x = torch.randn(3, size)
        try:
            found = exported(x)
        except (AssertionError, RuntimeError):
            continue
        taken.append(size)
        assert _same(found, module(x)), size
    assert 8 in taken


@pytest.mark.parametrize("kind", ["Half", "Upwards", "Factor"])
def test_integers_made_of_sizes_stay_dynamic(kind, tmp_path):
    """``int`` of a size that is an integer already fixes nothing, and neither does ``math.ceil``.

    The trace replaces the name ``int`` in the module's code, and takes the replacement away afterwards.
    """
    module = made(kind)
    exported = export_onnx(module, (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sizes.onnx")
    for size in (8, 7, 12, 41):
        x = torch.randn(3, size)
        assert _same(torch.tensor(session.run(None, {"x": x.numpy()})[0]), module(x))
        assert _same(exported(x), module(x))
    assert "int" not in globals()


@pytest.mark.parametrize("kind", ["Rounded", "Root", "AsFloat"])
def test_a_size_that_has_to_be_that_of_the_example_is_stated_as_fixed(kind, tmp_path):
    exported = export_onnx(made(kind), (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    (given,) = onnxruntime.InferenceSession(tmp_path / "sizes.onnx").get_inputs()
    assert given.shape[1] == 8
    assert isinstance(given.shape[0], str)
    if kind != "AsFloat":  # torch itself fixes that one
        assert any(remark.startswith("x.shape[1] is fixed at 8, since") for remark in exported.report.remarks)


def test_a_case_of_sizes_that_the_conversion_fixed_is_in_the_report_and_no_failure(tmp_path):
    exported = export_onnx(made("Pooled"), (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    x = torch.randn(3, 17)
    assert _same(exported.program.module()(x), made("Pooled")(x))
    assert any("not replayed with the file, which refuses their sizes" in remark for remark in exported.report.remarks)
    with pytest.raises(Exception, match="these sizes are refused"):
        onnxruntime.InferenceSession(tmp_path / "sizes.onnx").run(None, {"x": x.numpy()})


def test_a_session_refuses_sizes_above_which_the_model_computes_something_else(tmp_path):
    module = made("UpToNine")
    exported = export_onnx(module, (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sizes.onnx")
    for size in (2, 8, 9):
        x = torch.randn(3, size)
        assert _same(torch.tensor(session.run(None, {"x": x.numpy()})[0]), module(x))
    with pytest.raises(Exception, match=r"these sizes are refused, expected x\.shape\[1\] <= 9"):
        session.run(None, {"x": torch.randn(3, 10).numpy()})
    assert any(remark.startswith("x.shape[1] is 9 at most") for remark in exported.report.remarks)


def test_a_given_program_that_takes_too_much_is_named():
    """A program that other code traced is not traced again here: its report names the size."""
    program = torch.export.export(
        made("Rounded"),
        (torch.randn(2, 8),),
        dynamic_shapes={"x": {0: Dim.AUTO, 1: Dim.AUTO}},
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    report = prove_program(program, made("Rounded")).report
    assert any(remark.startswith("the program was traced for x.shape[1] == 8") for remark in report.remarks)


@pytest.mark.slow
def test_depth_anything_takes_pictures_of_any_size(tmp_path):
    """Its head computes ``int(patch_height * self.patch_size)``, which fixed the size of the example."""
    torch.manual_seed(0)
    bone = transformers.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=56,
        patch_size=14,
        out_indices=[1, 2],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=bone,
        patch_size=14,
        neck_hidden_sizes=[16, 16],
        reassemble_factors=[2, 1],
        fusion_hidden_size=16,
        head_hidden_size=8,
        reassemble_hidden_size=32,
        initializer_range=0.1,
    )
    model = transformers.DepthAnythingForDepthEstimation(config).eval()
    export_onnx(model, kwargs={"pixel_values": torch.randn(2, 3, 70, 84)}, path=tmp_path / "depth.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "depth.onnx")
    for rows, columns in ((112, 56), (56, 56), (28, 140)):
        pixels = torch.randn(3, 3, rows, columns)
        with torch.no_grad():
            expected = model(pixel_values=pixels).predicted_depth
        (found,) = session.run(None, {"pixel_values": pixels.numpy()})
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


class Biased(torch.nn.Module):
    """Adds a bias whose length is that of two others together, as ALiBi of Bloom does with a cache."""

    def forward(self, query, x, y, bias):
        return bias[:, None].baddbmm(query, torch.cat([x, y], 1).transpose(1, 2))


def test_a_size_that_is_one_or_a_sum_stays_dynamic():
    """torch asserts *or*; no size is fixed for it."""

    def inputs(first, second):
        names = {"query": (2, 3, 4), "x": (2, first, 4), "y": (2, second, 4), "bias": (2, first + second)}
        return {name: torch.randn(*shape) for name, shape in names.items()}

    module = Biased()
    exported = export_program(module, kwargs=inputs(5, 3))
    assert not any("fixed" in remark for remark in exported.report.remarks)
    for sizes in ((7, 4), (2, 9)):
        given = inputs(*sizes)
        assert _same(exported(**given), module(**given))


class MaskedSum(torch.nn.Module):
    def forward(self, past, new, mask):
        return torch.cat([past, new], 1) * mask


def test_a_mask_over_past_and_new_tokens_may_be_shorter_than_two_and_two(tmp_path):
    """torch states two as the least length of either, and so four as that of the mask; one and one is right."""

    def inputs(past, new):
        return {name: torch.randn(2, size) for name, size in (("past", past), ("new", new), ("mask", past + new))}

    module = MaskedSum()
    export_onnx(module, kwargs=inputs(5, 3), path=tmp_path / "mask.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "mask.onnx")
    for sizes in ((1, 1), (0, 1), (1, 2), (2, 2), (7, 4)):
        given = inputs(*sizes)
        (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
        torch.testing.assert_close(torch.tensor(found), module(**given))
