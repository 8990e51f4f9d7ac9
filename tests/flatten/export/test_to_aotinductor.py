"""A package of AOTInductor: views that lowering refuses are copies, and sums stay within their output."""

import subprocess
import sys

import torch
from torch.export import Dim

from yobx_flatten import export_program, register_flattening_functions
from yobx_flatten.export.runtimes.aotinductor import write_package


class Joined(torch.nn.Module):
    """Heads of which the first half is rotated, seen as rows."""

    def forward(self, x):
        heads = x.permute(0, 2, 1, 3)
        rows = torch.cat([heads[..., :2] * 2.0, heads[..., 2:]], -1).contiguous()
        return {"y": rows.view(-1, rows.shape[2], 4)}


def test_a_view_that_lowering_refuses_is_a_copy(monkeypatch, tmp_path):
    """torch gives the joined tensor other strides as it lowers; what is compiled then computes the same."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = export_program(Joined(), (), {"x": torch.ones(2, 3, 5, 4)}, dynamic_shapes={"x": free}, cases=[])
    compiled = []

    def compile_second(program, **options):
        compiled.append(program)
        if len(compiled) == 1:
            raise ValueError("Cannot view a tensor with shape torch.Size([s57, 4, s70, 16])")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_second)
    with register_flattening_functions():
        write_package(exported._source.traced, tmp_path / "model.pt2")
    x = torch.randn(3, 2, 5, 4)
    (found,) = compiled[1].module()(x)
    torch.testing.assert_close(found, Joined()(x)["y"])
    assert not compiled[1].graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)


_TAIL = '''
import torch
from torch.nn.functional import pad
from yobx_flatten import export_program

class Gated(torch.nn.Module):
    """A product whose inner sum and whose rows are vectors, with a loop between both."""

    def forward(self, x):
        x = x.permute(0, 3, 1, 2)
        gelu = x * 0.5 * (torch.erf(x * 0.5**0.5) + 1)
        rows = pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
        return torch.matmul(pad(gelu, (0, 0, 0, 0, 0, 58), value=0.5), rows)

program = export_program(Gated(), (torch.randn(1, 66, 66, 8),), dynamic_shapes=None, cases=[])
print(program.to_aotinductor("gated.pt2").cases[0].max_difference)
'''


def test_a_sum_whose_last_rows_are_fewer_than_a_vector_stays_within_its_output(tmp_path):
    """torch alone writes past the end here, which ends the process or changes other rows: so in one of its own."""
    done = subprocess.run([sys.executable, "-c", _TAIL], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-4  # beside eager; sums of 66 products
