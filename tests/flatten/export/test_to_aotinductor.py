"""A package of AOTInductor: sizes that may not be 0, views that lowering refuses, a cache written in place."""

import os
import shutil
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch.export import Dim

from tests.flatten.export.rewound_rows import WritesIntoBuffers, small_llama, small_mistral
from tests.flatten.export.small_step import Decay, inputs, loop_inputs, make_step, shapes
from tests.modules import module_of
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_program, register_flattening_functions
from yobx_flatten.errors import ReplayError
from yobx_flatten.export.flat_program import flat_program, signature_of
from yobx_flatten.export.runtimes import write as runtimes
from yobx_flatten.export.runtimes.aotinductor import lift_sizes, refused_when_empty, transposed_weights, write_package
from yobx_flatten.runners.signature import KEY, Signature


def _convolved(self, x, state):
    rows = torch.cat([state, x], dim=1)
    return {"y": rows[:, -x.shape[1] :] * x, "present": rows[:, -state.shape[1] :]}


def _refused(program):
    traced = program._source.traced
    with register_flattening_functions():
        return refused_when_empty(flat_program(traced.program), signature_of(traced))


def test_a_size_is_refused_where_the_module_refuses_it_and_the_package_states_it(monkeypatch, tmp_path):
    module, free = module_of(_convolved), {0: Dim.AUTO, 1: Dim.AUTO}
    given = {"x": torch.ones(2, 3, 4), "state": torch.ones(2, 5, 4)}
    convolved = export_program(module, (), given, dynamic_shapes={"x": free, "state": {0: Dim.AUTO}}, cases=[])
    with pytest.raises(RuntimeError, match="must match"):
        module(torch.ones(2, 0, 4), torch.ones(2, 5, 4))
    assert module(torch.ones(0, 3, 4), torch.ones(0, 5, 4))["y"].shape == (0, 3, 4)
    sizes = {name: sizes for name, _, sizes in signature_of(convolved._source.traced).inputs}
    assert _refused(convolved) == [next(iter(sizes["x"][1]))]
    step = make_step()  # sizes that depend on each other are changed together
    with torch.no_grad():
        assert step(**inputs(2, 0, 2))["logits"].shape == (2, 2, 16)
    assert _refused(export_program(step, (), inputs(2, 3, 2), dynamic_shapes=shapes(), cases=[])) == []
    written = {}
    compiles = lambda program, **options: written.update(options["inductor_configs"])  # noqa: E731 # returns None
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiles)
    with register_flattening_functions():
        write_package(convolved._source.traced, tmp_path / "model.pt2")
    signature = Signature.from_json(written["aot_inductor.metadata"][KEY], "model.pt2")
    signature.check_sizes({"x": (2, 1, 4), "state": (2, 5, 4)}, ReplayError, "model.pt2")
    with pytest.raises(ReplayError, match=r"^x has size 0 in axis 1, but model.pt2 was made for 1 or more\.$"):
        signature.check_sizes({"x": (2, 0, 4), "state": (2, 5, 4)}, ReplayError, "model.pt2")


def _joined(self, x):
    heads = x.permute(0, 2, 1, 3)
    rows = torch.cat([heads[..., :2] * 2.0, heads[..., 2:]], -1).contiguous()
    return {"y": rows.view(-1, rows.shape[2], 4)}


def test_a_view_that_lowering_refuses_is_a_copy(monkeypatch, tmp_path):
    """torch gives the joined tensor other strides as it lowers; what is compiled then computes the same."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = export_program(
        module_of(_joined), (), {"x": torch.ones(2, 3, 5, 4)}, dynamic_shapes={"x": free}, cases=[]
    )
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
    torch.testing.assert_close(found, module_of(_joined)(x)["y"])
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


def test_a_weight_that_only_products_and_a_table_read_is_exchanged():
    """Only products in float32 are exchanged, as only those were measured."""

    def tied(self, ids):
        hidden = self.scaled(self.product(self.table(ids)).relu()) * self.scaled.weight.sum()
        return self.head(hidden)

    torch.manual_seed(0)
    linear, table = torch.nn.Linear, torch.nn.Embedding(11, 6)
    module = module_of(tied, table=table, product=linear(6, 5), scaled=linear(5, 6), head=linear(6, 11, bias=False))
    module.head.weight = table.weight
    program = torch.export.export(module, (torch.tensor([[1, 2, 3]]),), dynamic_shapes=({1: Dim.AUTO},))
    made = transposed_weights(program)
    ids = torch.tensor([[4, 0, 10, 7, 7]])
    torch.testing.assert_close(made.module()(ids), module(ids), atol=1e-6, rtol=0)
    weights = made.state_dict
    assert [tuple(weights[f"{name}.weight"].shape) for name in ("product", "scaled")] == [(6, 5), (6, 5)]
    tied = [weights[name] for name in made.graph_signature.parameters if name in ("table.weight", "head.weight")]
    assert {tuple(weight.shape) for weight in tied} == {(6, 11)}
    assert len({weight.data_ptr() for weight in tied}) == 1
    assert module.product.weight.shape == program.state_dict["product.weight"].shape == (5, 6)
    wide = torch.export.export(module.double(), (torch.tensor([[1, 2, 3]]),))
    assert transposed_weights(wide).state_dict["product.weight"].shape == (5, 6)


def test_the_sizes_of_outputs_are_inputs_of_the_loop_which_returns_what_it_returned():
    """AOTInductor allocates the outputs before the loop, from the sizes that it is given."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    program = torch.export.export(Decay(), (), loop_inputs(2, 3), dynamic_shapes=(free, free, {0: Dim.AUTO}))
    lift_sizes(program.graph_module)
    torch.testing.assert_close(program.module()(**loop_inputs(3, 5)), Decay()(**loop_inputs(3, 5)))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    given = {str(size.meta["val"]) for size in node.args[3]}
    asked = {str(size) for value in node.meta["val"] for size in value.shape if isinstance(size, torch.SymInt)}
    assert asked == given
    body = getattr(program.graph_module, node.args[0].target)
    assert len(body.graph.find_nodes(op="placeholder")) == 1 + 2 + len(given)
    plain = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    before = str(plain.graph)
    lift_sizes(plain.graph_module)
    assert str(plain.graph) == before


if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("AOTInductor needs a C++ compiler", allow_module_level=True)


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("aotinductor") / "llama"
    return export_folder(model, place, target="aotinductor", proof="sample")


@pytest.mark.slow
@pytest.mark.extended
class TestPackage(WritesIntoBuffers):
    file = "model.pt2"
    opened: ClassVar = {"trust": True}


@pytest.mark.slow
def test_layers_that_slide_keep_a_cache_that_is_returned(tmp_path):
    found = export_folder(small_mistral(), tmp_path / "mistral", target="aotinductor", proof="sample")
    report = found.reports["model.pt2"]
    notes = [note for note in report.remarks if "the cache is copied by each call" in note]
    assert any("each layer has a sliding window" in note for note in notes)
    assert (report.in_place, found.verified.manifest.cache) == ([], "growing")


@pytest.mark.slow
def test_a_package_that_computes_something_else_is_left_out(model, tmp_path, monkeypatch):
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])

    compiled = runtimes.write_package

    def stops(traced, path, *, in_place=False):
        if in_place:
            raise RuntimeError("no such kernel")
        return compiled(traced, path)

    monkeypatch.setattr(runtimes, "write_package", stops)
    report = exported.to_aotinductor(tmp_path / "model.pt2")
    reason = "a file that writes it in place was left out: RuntimeError: no such kernel"
    assert f"the cache is copied by each call: {reason}" in report.remarks
    assert (report.ok, report.in_place) == (True, [])
    asked = exported.to_aotinductor(tmp_path / "asked.pt2", cache="returned")
    assert not any("cache" in note for note in asked.remarks)
