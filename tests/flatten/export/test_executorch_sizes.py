"""Files of ExecuTorch take every size up to the largest, and loops over tokens have those of each call."""

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from tests.models import make_model
from yobx_flatten import Case, DecodeSizes, decode_inputs, dynamic_shapes, export_program, register_flattening_functions
from yobx_flatten.runners.open import open_runner

pytest.importorskip("executorch.exir")
# lowering imports them, and they register classes
pytest.importorskip("torchao.quantization")
pytest.importorskip("torchao.prototype.mx_formats")

pytestmark = pytest.mark.slow


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, decay, added, state):
        def step(state, given):
            state = given[0] * state + given[1]
            return state, state.sum(-1)

        return scan(step, state, (decay.transpose(0, 1), (added * self.weight).transpose(0, 1)))


def inputs(batch, tokens):
    generator = torch.Generator().manual_seed(batch + 8 * tokens)
    shapes = {"decay": (batch, tokens, 4), "added": (batch, tokens, 4), "state": (batch, 4)}
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def test_a_loop_of_executorch_computes_in_every_size(tmp_path):
    axes = {0: Dim.AUTO(max=4), 1: Dim.AUTO(max=8)}
    shapes = {"decay": axes, "added": axes, "state": {0: axes[0]}}
    exported = export_program(Decay(), (), inputs(2, 3), dynamic_shapes=shapes, cases=[])
    exported.to_executorch(tmp_path / "loop.pte", backend="portable")
    runner = open_runner(tmp_path / "loop.pte")
    for sizes in ((4, 8), (1, 1), (3, 5), (4, 1), (2, 8)):
        given = inputs(*sizes)
        with torch.no_grad():
            expected = Decay()(**given)
        found = [runner.run(given)[name] for name in runner.outputs]
        torch.testing.assert_close(found, list(expected))


def test_memory_is_planned_for_the_largest_batch_of_a_decoder_with_windows(tmp_path):
    """Lowering loses the bound of a size that several inputs share: a batch above the example's was refused."""
    model = make_model("mistral")
    given = decode_inputs(model, DecodeSizes(2, 20, 3))  # more than the window
    shapes = dynamic_shapes(given, bounds={"batch": 4, "length": 64})
    largest = Case("the largest batch", (), decode_inputs(model, DecodeSizes(4, 5, 3)), 1)
    with register_flattening_functions(patch_transformers=True):
        exported = export_program(model, (), given, dynamic_shapes=shapes, cases=[largest])
        report = exported.to_executorch(tmp_path / "mistral.pte", backend="portable")
    assert [case.error for case in report.cases] == [None, None]
    assert max(case.max_difference for case in report.cases) <= report.tolerance
