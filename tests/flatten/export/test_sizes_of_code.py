"""Sizes of programs and files: the largest, those that a trace fixed, and those that the module computes with."""

import math

import onnxruntime
import pytest
import torch
import transformers
from torch.export import Dim

from tests.cache_words import WORD
from tests.flatten.export.small_step import cases, inputs, make_step
from tests.models import make_model
from tests.modules import module_class, module_of
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, explain_error
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import DynamicShapesError, FlattenError, InvalidArgumentError
from yobx_flatten.export import Case, export_onnx, export_program, prove_program
from yobx_flatten.export.example import Bounds
from yobx_flatten.model_folder.source.configuration import small_model

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


def _shifted(self, x):
    """torch asks whether the part of it is contiguous, which it answers for more than one column."""
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1].clone()
    return shifted * 2


def _same(found, expected):
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_file_and_a_program_give_the_module_s_numbers_or_stop(kind, tmp_path):
    """torch leaves comparisons with rounded numbers out; ``int`` and ``math.ceil`` of an integer size fix nothing."""
    module = made(kind)
    exported, of_file = _file(tmp_path, module)
    assert "int" not in globals()
    for call in (exported, of_file):
        taken = []
        for size in (8, 7, 6, 9, 12, 3, 16, 20, 2, 41):
            x = torch.randn(3, size)
            try:
                found = call(x)
            except Exception:  # whatever onnxruntime raises
                continue
            taken.append(size)
            assert _same(found, module(x)), size
        assert 8 in taken
        if kind in ("Half", "Upwards", "Factor"):
            assert {8, 7, 12, 41} <= {*taken}


def _file(tmp_path, module):
    """Export a module of one input, and return the export and a function that calls the file."""
    exported = export_onnx(module, (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sizes.onnx")
    return exported, lambda x: torch.tensor(session.run(None, {"x": x.numpy()})[0])


def test_a_file_takes_sizes_that_its_program_refuses_and_computes_right(tmp_path):
    module = module_of(_shifted)
    _, call = _file(tmp_path, module)
    for size in (2, 3, 9):
        x = torch.randn(3, size)
        assert _same(call(x), module(x)), size


@pytest.mark.parametrize("kind", ["Rounded", "Root", "AsFloat"])
def test_a_size_that_has_to_be_that_of_the_example_is_stated_as_fixed(kind, tmp_path):
    exported = export_onnx(made(kind), (torch.randn(2, 8),), path=tmp_path / "sizes.onnx")
    (given,) = onnxruntime.InferenceSession(tmp_path / "sizes.onnx").get_inputs()
    assert given.shape[1] == 8
    assert isinstance(given.shape[0], str)
    if kind != "AsFloat":  # torch itself fixes that one
        assert any(remark.startswith("x.shape[1] is fixed at 8, since") for remark in exported.report.remarks)


def test_a_case_of_sizes_that_the_conversion_fixed_is_in_the_report_and_no_failure(tmp_path):
    exported, call = _file(tmp_path, made("Pooled"))
    x = torch.randn(3, 17)
    assert _same(exported.program.module()(x), made("Pooled")(x))
    assert any("not replayed with the file, which refuses their sizes" in remark for remark in exported.report.remarks)
    with pytest.raises(Exception, match="these sizes are refused"):
        call(x)


def test_a_session_refuses_sizes_above_which_the_model_computes_something_else(tmp_path):
    exported, call = _file(tmp_path, made("UpToNine"))
    for size in (2, 8, 9):
        x = torch.randn(3, size)
        assert _same(call(x), made("UpToNine")(x))
    with pytest.raises(Exception, match=r"these sizes are refused, expected x\.shape\[1\] <= 9"):
        call(torch.randn(3, 10))
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
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2, "image_size": 56}
    how = {"out_indices": [1, 2], "reshape_hidden_states": False, "apply_layernorm": True}
    neck = {"neck_hidden_sizes": [16, 16], "reassemble_factors": [2, 1], "fusion_hidden_size": 16}
    head = {"head_hidden_size": 8, "reassemble_hidden_size": 32, "initializer_range": 0.1}
    bone = transformers.Dinov2Config(**sizes, patch_size=14, **how)
    config = transformers.DepthAnythingConfig(backbone_config=bone, patch_size=14, **neck, **head)
    model = transformers.DepthAnythingForDepthEstimation(config).eval()
    export_onnx(model, kwargs={"pixel_values": torch.randn(2, 3, 70, 84)}, path=tmp_path / "depth.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "depth.onnx")
    for rows, columns in ((112, 56), (56, 56), (28, 140)):
        pixels = torch.randn(3, 3, rows, columns)
        with torch.no_grad():
            expected = model(pixel_values=pixels).predicted_depth
        (found,) = session.run(None, {"pixel_values": pixels.numpy()})
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_a_size_that_is_one_or_a_sum_stays_dynamic():
    """torch asserts *or*; no size is fixed for it: a bias as long as two others, as ALiBi of Bloom with a cache."""

    def inputs(first, second):
        names = {"query": (2, 3, 4), "x": (2, first, 4), "y": (2, second, 4), "bias": (2, first + second)}
        return {name: torch.randn(*shape) for name, shape in names.items()}

    def biased(self, query, x, y, bias):
        return bias[:, None].baddbmm(query, torch.cat([x, y], 1).transpose(1, 2))

    module = module_of(biased)
    exported = export_program(module, kwargs=inputs(5, 3))
    assert not any("fixed" in remark for remark in exported.report.remarks)
    for sizes in ((7, 4), (2, 9)):
        given = inputs(*sizes)
        assert _same(exported(**given), module(**given))


def test_a_mask_over_past_and_new_tokens_may_be_shorter_than_two_and_two(tmp_path):
    """torch states two as the least length of either, and so four as that of the mask; one and one is right."""

    def inputs(past, new):
        return {name: torch.randn(2, size) for name, size in (("past", past), ("new", new), ("mask", past + new))}

    module = module_class("MaskedSum", lambda self, past, new, mask: torch.cat([past, new], 1) * mask)()
    export_onnx(module, kwargs=inputs(5, 3), path=tmp_path / "mask.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "mask.onnx")
    for sizes in ((1, 1), (0, 1), (1, 2), (2, 2), (7, 4)):
        given = inputs(*sizes)
        (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
        torch.testing.assert_close(torch.tensor(found), module(**given))


BOUNDS = {"batch": 4, "length": 12, "new": 5}


def test_every_leaf_has_its_bound_and_a_call_above_is_explained():
    exported = export_program(make_step(), (), inputs(2, 3, 2), bounds=BOUNDS, cases=cases())
    fits = inputs(4, 7, 5)
    with torch.no_grad():
        expected = make_step()(**fits)
    torch.testing.assert_close(exported(**fits)["logits"], expected["logits"])
    for above in (inputs(5, 3, 2), inputs(2, 3, 6), inputs(2, 11, 2)):
        with pytest.raises(AssertionError, match="Guard failed") as caught:
            exported(**above)
    explained = str(explain_error(caught.value, exported.program, (), above))
    assert "is valid only for attention_mask.shape[1] <= 12" in explained
    assert "bounds= or a Dim set the range" in explained


def test_cases_above_the_bounds_are_left_out():
    larger = [Case("12 tokens", (), inputs(2, 10, 2), steps=2), Case("a row too many", (), inputs(5, 3, 2), steps=1)]
    fitting = Case("as long as can be", (), inputs(2, 8, 2), steps=2)
    report = export_program(make_step(), (), inputs(2, 3, 2), bounds=BOUNDS, cases=[*larger, fitting]).report
    assert [case.case for case in report.cases] == ["the example", "as long as can be"]
    assert report.remarks == ["2 cases were left out: they are larger than the bounds."]


def test_caches_masks_and_tokens_have_bounds_of_their_own_inside_and_outside_the_block():
    given = decode_inputs(make_model("llama"), DecodeSizes(2, 5, 3))
    specs = Bounds.of({"batch": 4, "length": 64, "new": 16}).on(given, dynamic_shapes(given))
    assert [dim.max for dim in specs["input_ids"].values()] == [4, 16]
    assert [dim.max for dim in specs["attention_mask"].values()] == [4, 64]
    assert [[dim.max for dim in leaf.values()] for leaf in specs[WORD]] == [[4, 64]] * 4
    bounds = Bounds.of({"batch": 4, "length": 12})
    specs = bounds.on(given, dynamic_shapes(given))
    with register_flattening_functions(patch_transformers=True):
        assert bounds.holds(given, specs, steps=2)
    assert [bounds.holds(given, specs, steps=steps) for steps in (2, 3)] == [True, False]
    for above in (DecodeSizes(2, 12, 1), DecodeSizes(5, 5, 3)):
        assert not bounds.holds(decode_inputs(make_model("llama"), above), specs)


def test_shapes_of_a_class_that_flattens_to_a_tuple_stay_a_tuple():
    """torch takes no list for them, with bounds or without."""

    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

    register_class_flattening(Pair, lambda pair: ((pair.x, pair.y), None), lambda children, _: Pair(*children), None)
    try:
        shapes = {"pair": ({0: Dim.AUTO, 1: Dim.AUTO},) * 2}
        model = module_of(lambda self, pair: pair.x + pair.y)
        given = {"pair": Pair(torch.randn(3, 4), torch.randn(3, 4))}
        exported = export_program(model, kwargs=given, dynamic_shapes=shapes, bounds={"batch": 8, "length": 16})
    finally:
        unregister_class_flattening(Pair)
    assert sorted(int(found.upper) for found in exported.program.range_constraints.values()) == [8, 16]


@pytest.mark.parametrize("bounds", [{"rows": 4}, {"batch": 0}, {"length": 8.0}, {}])
def test_what_is_not_a_bound_is_refused(bounds):
    with pytest.raises(InvalidArgumentError, match="bounds: expected a dict of ints for"):
        export_program(make_step(), (), inputs(2, 3, 2), bounds=bounds)


def test_an_example_above_a_bound_and_a_bound_above_the_positions_are_refused_before_the_trace():
    message = r"attention_mask\.axis 1: size 5 of the example is above the bound 4 of 'length'"
    with pytest.raises(DynamicShapesError, match=message) as caught:
        export_program(make_step(), (), inputs(2, 3, 2), bounds={"length": 4})
    assert str(caught.value).endswith('bounds={"length": 5}')
    model = make_model("llama")
    most = model.config.max_position_embeddings
    given = decode_inputs(model, DecodeSizes(2, 5, 3))
    with pytest.raises(DynamicShapesError, match=f"is above the {most} positions of LlamaForCausalLM") as caught:
        export_program(model, (), given, bounds={"batch": 4, "length": most + 1, "new": 16})
    assert str(caught.value).endswith(f"bounds={{'batch': 4, 'length': {most}, 'new': 16}}")


def test_a_fixed_axis_needs_no_room_below_the_bound_and_one_that_varies_does():
    given, head = {"features": torch.randn(2, 3, 9)}, torch.nn.Linear(9, 3)
    module = module_of(lambda self, features: self.head(features), head=head)
    exported = export_program(module, (), given, bounds={"length": 8})
    assert exported.report.ok
    with pytest.raises(AssertionError, match="Guard failed"):
        exported(features=torch.randn(2, 9, 9))
    with pytest.raises(DynamicShapesError, match=r"features\.axis 2: size 9 of the example is above the bound 8"):
        export_program(module_of(lambda self, features: features.sum(2)), (), given, bounds={"length": 8})


class Loop(torch.nn.Module):
    def forward(self, x, y):
        total = y.sum()
        for row in range(len(x)):
            total = total + x[row].sum() * row
        return total + torch.zeros_like(y)


# torch says so of the weights of an LSTM
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_the_length_of_an_lstm_is_stated_and_its_width_is_not():
    """Its trace is a loop over the steps of the example."""
    module = module_of(lambda self, x: self.reads(x)[0], reads=torch.nn.LSTM(8, 8, batch_first=True))
    exported = export_program(module, (torch.randn(2, 7, 8),), cases=[])
    assert "x.shape[1] is fixed at 7 by the trace: the model accepts other sizes;" in str(exported.report)
    assert "x.shape[2]" not in str(exported.report)
    assert module(torch.randn(3, 9, 8)).shape == (3, 9, 8)
    with pytest.raises((FlattenError, AssertionError, RuntimeError)):
        exported.program.module()(torch.randn(3, 9, 8))
    unproven = export_program(module, (torch.randn(2, 7, 8),), cases=[], proof="none").report
    assert "by the trace" not in str(unproven)  # the model is not called


def test_a_model_that_writes_to_its_weights_is_as_it_was():
    """It is called once more, with one row more of each size that was fixed."""

    def learns(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return sum(x[:, place] for place in range(x.shape[1])) * self.weight

    module = module_of(learns, weight=torch.ones(3)).requires_grad_(False)
    report = export_program(module, (torch.randn(2, 4, 3),), cases=[]).report
    assert "x.shape[1] is fixed at 4 by the trace: the model accepts other sizes" in str(report)
    assert module.weight.tolist() == [1, 1, 1]


def test_sizes_that_belong_together_are_tried_together_and_what_varies_or_was_fixed_by_the_caller_is_no_note():
    masked = module_class("Masked", lambda self, x, mask: sum(x[:, i] * mask[:, i] for i in range(x.shape[1])))()
    report = export_program(masked, (torch.randn(2, 5), torch.ones(2, 5)), cases=[]).report
    assert "x.shape[1] is fixed at 5 by the trace: the model accepts other sizes" in str(report)
    example = (torch.randn(4, 3), torch.randn(6))
    assert "x.shape[0] is fixed at 4" in str(export_program(Loop(), example, cases=[]).report)
    stated = ({1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    assert "is fixed at" not in str(export_program(Loop(), example, dynamic_shapes=stated, cases=[]).report)
    assert "is fixed at" not in str(export_program(Loop(), example, dynamic_shapes=None, cases=[]).report)


@pytest.mark.timeout(900)  # 105 s on an idle machine
def test_the_batch_of_swin_varies():
    model, pictures = small_model("swin"), torch.randn(4, 3, 32, 32)
    exported = export_program(model, kwargs={"pixel_values": torch.randn(2, 3, 32, 32)})
    found = exported.program.module()(pixel_values=pictures)
    torch.testing.assert_close(found.last_hidden_state, model(pictures).last_hidden_state)
