"""What a step is expected to upload of the experts of a mixture: counted, by hand, and beside a run."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from roundpipe_runtime.cli.plan import write_plan
from roundpipe_runtime.engine.parameters import partial_table
from roundpipe_runtime.estimate.hardware import describe_hardware
from roundpipe_runtime.estimate.step_plan import MOST_READ, expected_share
from roundpipe_runtime.huggingface.plan_training import PlannedTraining
from tests.transformers_versions import needs_transformers


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 3), (3, 3, 2)])
def test_the_share_is_the_mean_over_all_routings(experts, per_token, tokens):
    """All ways to give each token different experts, which are as likely as each other."""
    choices = list(itertools.combinations(range(experts), per_token))
    routings = list(itertools.product(choices, repeat=tokens))
    hit = sum(len(set(itertools.chain(*routing))) for routing in routings)
    assert expected_share(experts, per_token, tokens) == pytest.approx(float(Fraction(hit, len(routings) * experts)))


def test_plan_and_runtime_upload_all_from_the_same_share_on():
    assert MOST_READ == partial_table.MOST_READ


def planned(rows, length):
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))
    cards = describe_hardware("cuda:0,cuda:1", memory=80 * 2**30, link=25e9, flops=150e12)
    training = PlannedTraining(model, cards)
    report = training.report(batch=rows, length=length, num_microbatch=rows)
    return report, write_plan(training, report, None, rows=rows, length=length, details=True)


@needs_transformers("5.0", "its experts are modules, which on meta nobody knows to be called")
def test_a_plan_states_the_experts_of_a_few_tokens():
    """Two layers of eight experts of 3 x 4096 x 14336 numbers in float32; two tokens reach 7/16 of them."""
    report, text = planned(2, 1)
    whole = 2 * 8 * 3 * 4096 * 14336 * 4
    assert report.step.expert_bytes == (whole, whole * 7 // 16)
    assert "At most 4.93 GB of 11.3 GB of experts are expected to be copied in each pass." in text
    unknown = dataclasses.replace(report.step, layers=[dataclasses.replace(one, experts=0) for one in report.layers])
    for which in ("upload", "download"):  # each layer goes up once: there is room to stay
        ours, all_of_them = (
            sum(getattr(load, which) for load in report.simulate(step).loads) for step in (report.step, unknown)
        )
        assert all_of_them - ours == whole * 9 // 16
    assert max(memory.total for memory in report.device_memory) > whole / 2  # there is room for all


@needs_transformers("5.0", "its experts are modules, which on meta nobody knows to be called")
def test_a_plan_of_many_tokens_uploads_all_experts():
    report, text = planned(2, 64)
    whole, expected = report.step.expert_bytes
    assert whole == expected
    assert "All 11.3 GB of experts are copied in each pass" in text
