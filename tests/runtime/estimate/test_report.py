"""What a training comes to, and what a step is expected to upload of the experts of a mixture."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from roundpipe_runtime.cli.plan import write_plan
from roundpipe_runtime.estimate.footprint import measure_layers
from roundpipe_runtime.estimate.hardware import Hardware, describe_hardware
from roundpipe_runtime.estimate.report import plan_report
from roundpipe_runtime.estimate.step_plan import expected_share
from roundpipe_runtime.huggingface.plan_training import PlannedTraining
from tests.transformers_versions import needs_transformers

WIDTH, ROWS = 64, 16


def hardware(*, count=2, flops=1e9, link=1e12, memory=None, host=None, kind="cuda"):
    names = tuple(f"{kind}:{index}" for index in range(count))
    return Hardware(names, kind, flops, link, memory, host, 1e9, {})


def report(machine, *, layers=6, dtype=torch.float32, tokens=3 * ROWS, optim_dtype=None):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta", dtype=dtype) for _ in range(layers)])
    given = torch.empty(ROWS, WIDTH, device="meta", dtype=dtype)
    found = measure_layers(list(model), (given,), gradient_dtype=lambda p: optim_dtype or p.dtype)
    return plan_report(model, list(model), found, machine, num_microbatch=3, tokens=tokens, optim_dtype=optim_dtype)


def test_equal_layers_get_the_plan_of_the_runtime():
    """A forward stage holds three layers where a backward stage holds one; the last layer is the fused stage."""
    found = report(hardware())
    assert [stage.kind for stage in found.step.stages][:3] == ["forward", "forward", "fused"]
    assert all(one.step.device == one.step.stage % 2 for one in found.simulation.steps)
    assert found.simulated.loads[2].compute == pytest.approx(3 * 2 * ROWS * WIDTH * WIDTH / 1e9)


def test_tokens_that_hide_transfers_follow_the_formula():
    """Bytes of a parameter times F / (2 B) forward: 2 x width^2 operations a token against 4 bytes of each."""
    machine = hardware(flops=1e9, link=1e6, memory=10**5)
    found = report(machine)
    assert not found.simulated.stays
    assert found.tokens_forward == pytest.approx(4 * machine.flops / (2 * machine.link))
    # six operations a parameter with the forward that is done again, but for the first layer, whose input needs none
    layers = 6
    operations = 2 * (3 * layers - 1) * WIDTH * WIDTH
    assert found.tokens_backward == pytest.approx(
        4 * layers * WIDTH * WIDTH / machine.link * machine.flops / operations
    )


def test_sums_of_four_bytes_take_longer_than_weights_of_two():
    """The way back is the slower one: then the formula counts its bytes."""
    narrow = report(hardware(link=1e6, memory=10**5), dtype=torch.bfloat16)
    wide = report(hardware(link=1e6, memory=10**5), dtype=torch.bfloat16, optim_dtype=torch.float32)
    assert wide.tokens_backward == pytest.approx(2 * narrow.tokens_backward)
    assert wide.tokens_forward == pytest.approx(narrow.tokens_forward)


def test_transfers_add_time_below_those_tokens_and_none_far_above():
    """The simulation says what the formula says."""
    few = report(hardware(flops=1e9, link=1e6, memory=10**5))
    assert few.simulation.time > 1.5 * few.simulated.unhindered.time
    quick = report(hardware(flops=1e9, link=1e12, memory=10**5))
    assert quick.simulation.time == pytest.approx(quick.simulated.unhindered.time, rel=0.01)
    assert (report(hardware()).simulated.stays, quick.simulated.stays) == (True, False)


def test_it_fits_or_it_does_not():
    unknown = report(hardware())
    assert (unknown.fits_devices, unknown.fits_host) == (None, None)
    needed = max(memory.total for memory in unknown.device_memory)
    assert report(hardware(memory=20 * needed, host=unknown.host_memory.total)).fits_devices
    assert report(hardware(host=unknown.host_memory.total)).fits_host
    assert report(hardware(host=unknown.host_memory.total - 1)).fits_host is False


def test_a_layer_that_is_too_large_is_a_result_and_no_error():
    found = report(hardware(memory=50_000))
    assert found.fits_devices is False
    assert "layer 0" in found.too_large
    # weight and gradient, of which a stage may have 0.6 / 2 of the memory
    assert found.least_memory == pytest.approx(2 * 4 * WIDTH * WIDTH / 0.3, rel=1e-3)
    assert not report(hardware(memory=found.least_memory + 1000)).too_large
    # bfloat16 weights and a float32 optimizer have 2 + 2 + 4 bytes a parameter, as the runtime has it
    found = report(hardware(memory=50_000), dtype=torch.bfloat16, optim_dtype=torch.float32)
    assert found.least_memory == pytest.approx((2 + 2 + 4) * WIDTH * WIDTH / 0.3, rel=1e-3)


def test_adam_moves_seven_numbers_a_parameter():
    """Four are read, three are written; at 1 GB/s."""
    parameters = 6 * WIDTH * WIDTH
    assert report(hardware()).simulated.optimizer_seconds == pytest.approx(7 * 4 * parameters / 1e9)
    wide = report(hardware(), dtype=torch.bfloat16, optim_dtype=torch.float32)
    assert wide.simulated.optimizer_seconds == pytest.approx((7 * 4 + 4 + 2) * parameters / 1e9)


def test_the_head_is_copied_where_that_pays():
    """A head of half the operations, on four devices: not over a link on which its gradients take longer."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(8)])
    model.append(nn.Linear(WIDTH, 8 * WIDTH, bias=False, device="meta"))
    layers = measure_layers(list(model), (torch.empty(ROWS, WIDTH, device="meta"),))

    def planned(link, copies):
        size = {"num_microbatch": 12, "tokens": 12 * ROWS, "last_stage_copies": copies}
        return plan_report(model, list(model), layers, hardware(count=4, link=link), **size)

    quick, slow = planned(1e12, "auto"), planned(1e6, "auto")
    assert quick.step.plan.last_stage_copies > 1
    assert quick.simulation.time < 0.8 * planned(1e12, 1).simulation.time
    assert slow.step.plan.last_stage_copies == 1
    assert slow.simulation.time < planned(1e6, 4).simulation.time
    # each microbatch of three of the copies goes down and up; the sums come down once
    head, single = 4 * 8 * WIDTH * WIDTH, planned(1e12, 1)
    copied = planned(1e12, 4)
    fused = [stage for stage in copied.step.stages if stage.kind == "fused"]
    assert [copied.step.share_bytes(stage) for stage in fused] == [head] * 4
    assert copied.host_memory.activations >= single.host_memory.activations + 9 * head


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 3), (3, 3, 2)])
def test_the_share_is_the_mean_over_all_routings(experts, per_token, tokens):
    """All ways to give each token different experts, which are as likely as each other."""
    choices = list(itertools.combinations(range(experts), per_token))
    routings = list(itertools.product(choices, repeat=tokens))
    hit = sum(len(set(itertools.chain(*routing))) for routing in routings)
    assert expected_share(experts, per_token, tokens) == pytest.approx(float(Fraction(hit, len(routings) * experts)))


def planned(rows, length):
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))
    cards = describe_hardware("cuda:0,cuda:1", memory=80 * 2**30, link=25e9, flops=150e12)
    training = PlannedTraining(model, cards)
    report = training.report(batch=rows, length=length, num_microbatch=rows)
    return report, write_plan(training, report, None, rows=rows, length=length, details=True)


@needs_transformers("5.0", "its experts are modules, which on meta nobody knows to be called")
def test_a_plan_states_the_experts_of_few_and_of_many_tokens():
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
    report, text = planned(2, 64)
    assert report.step.expert_bytes == (whole, whole)
    assert "All 11.3 GB of experts are copied in each pass" in text
