"""A configuration is checked when it is written, and what a call says goes before what the model says."""

import re

import pytest

from roundpipe_runtime.engine.config import RoundPipeRunConfig
from roundpipe_runtime.errors import ConfigError


def test_a_call_goes_before_the_model():
    model = RoundPipeRunConfig(num_microbatch=2, recompute_grain="layer", merge_output=True)
    merged = RoundPipeRunConfig(num_microbatch=4, merge_output=False).over(model)
    assert (merged.num_microbatch, merged.recompute_grain, merged.merge_output) == (4, "layer", False)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("requires_grad", 1, "True, False or None"),
        ("output_device", "toaster", 'a torch.device, like "cpu"'),
        ("recompute_grain", "block", '"stage" or "layer"'),
        ("num_microbatch", True, "a number of at least 1"),
        ("last_stage_copies", "all", 'a number of at least 1, or "auto"'),
        ("keep_parameters", -1, 'a number of GB of at least 0, or "auto"'),
        ("split_input", True, "(spec of args, spec of kwargs), a mapping from key paths or a function"),
        ("split_label", 3, "a tree of TensorChunkSpec and Replicate or a function"),
        ("merge_output", "cat", "True, False, a tree of TensorChunkSpec and Replicate, or a function"),
        ("execute_plan", [range(2)], "a ModelExecutePlan"),
        ("loss_reduction", "none", '"auto", "sum", "mean" or "joined"'),
    ],
)
def test_a_wrong_value_names_its_field(field, value, expected):
    with pytest.raises(
        ConfigError, match=re.escape(f"RoundPipeRunConfig: {field} must be {expected}, found {value!r}.")
    ):
        RoundPipeRunConfig(**{field: value})


def test_something_else_is_no_configuration():
    with pytest.raises(ConfigError, match="Expected a RoundPipeRunConfig, found dict"):
        RoundPipeRunConfig().over({})
