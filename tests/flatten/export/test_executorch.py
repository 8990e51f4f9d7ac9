"""Files of ExecuTorch: a cache in buffers of the caller, sizes of loops, and operators that it has no kernel for."""

import importlib.util

import pytest
import torch
from torch.export import Dim
from transformers import T5Config, T5ForConditionalGeneration

from tests.flatten.export.rewound_rows import LEAVES, WritesIntoBuffers, small_llama, small_mistral
from tests.flatten.export.small_step import Decay, loop_inputs
from tests.models import make_model
from tests.modules import module_class, module_of
from yobx_flatten import dynamic_shapes, export_folder, open_generator, register_flattening_functions
from yobx_flatten.errors import DamagedFileError, FlattenError, GenerationError, InvalidArgumentError, ReplayError
from yobx_flatten.export import Case, CaseResult, export_program, quantization
from yobx_flatten.export.exported_model import source_of
from yobx_flatten.export.flat_program import flat_program, signature_of
from yobx_flatten.export.runtimes import executorch
from yobx_flatten.export.runtimes import write as runtimes
from yobx_flatten.export.runtimes.executorch import grouped_product, with_row_buffers, written_out
from yobx_flatten.huggingface.cases import DecodeSizes, decode_inputs
from yobx_flatten.runners.executorch_runner import Rows
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.ports import present_of


@pytest.fixture(scope="module")
def model():
    return small_llama()


def _exported(model, sizes, **options):
    bounds = {"batch": 4, "length": 64}
    return export_program(model, kwargs=decode_inputs(model, sizes), bounds=bounds, **options)


@pytest.fixture(scope="module")
def exported(model):
    return _exported(model, DecodeSizes(), cases=[])


def _buffers(exported):
    traced = source_of(exported).traced
    presents = {name: present_of(name) for name in traced.input_names if present_of(name) in traced.output_names}
    with register_flattening_functions(patch_transformers=True):
        return with_row_buffers(flat_program(traced.program), presents, signature_of(traced))


def test_a_program_for_one_row_returns_the_scores_alone(exported):
    program, rows = _buffers(exported)
    inputs = dict.fromkeys(["input_ids", "attention_mask", *LEAVES], 0)
    assert rows == Rows(LEAVES, inputs, {"logits": 0})
    assert Rows.from_json(rows.to_json(), "model.pte") == rows
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    given = [tuple(value.shape) for value in values[-7:]]
    assert [shape[0] for shape in given[:2]] == [1, 1]
    assert [(shape[0], *shape[2:]) for shape in given[2:6]] == [(2, 1, 16)] * 4
    attend = torch.ops.yobx_flatten.attend.default
    assert len(program.graph.find_nodes(op="call_function", target=attend)) == 2
    (returned,) = program.graph.output_node().args[0]
    assert tuple(map(str, returned.meta["val"].shape))[::2] == ("1", "128")


def test_layers_that_slide_and_masks_of_each_head_have_no_buffers():
    """The first return something else than their input with new tokens after it; T5 adds a bias of each head."""
    with pytest.raises(FlattenError, match="no attention layer has one mask for all heads and appends"):
        _buffers(_exported(small_mistral(), DecodeSizes(2, 20, 3), cases=[]))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(FlattenError, match="one mask for all heads"):
        _buffers(_exported(model, DecodeSizes(), proof="none"))


@pytest.mark.parametrize(
    "text",
    ["{}", '{"in_place": 3, "inputs": {}, "outputs": {}}', '{"in_place": [], "inputs": {"a": "b"}, "outputs": {}}'],
)
def test_damaged_rows_are_refused(text):
    with pytest.raises(DamagedFileError, match=r"The list of rows in model\.pte is damaged"):
        Rows.from_json(text, "model.pte")


@pytest.fixture
def written(monkeypatch):
    found, differing = [], set()

    def write(traced, path, *, backend, in_place, quantized):
        found.append((backend, in_place))
        path.write_text("file", encoding="utf-8")
        return 64, ["past_key_values.0.key"] if in_place else []

    def replayed(job, *, trust=False, more=()):
        difference = 1.0 if found[-1] in differing else 1e-6
        job.report.cases.append(CaseResult("the example", "executorch", 1, {"logits": difference}, 0.0))

    monkeypatch.setattr(runtimes, "require_executorch", lambda caller: None)
    monkeypatch.setattr(runtimes, "write_pte", write)
    monkeypatch.setattr(runtimes._Job, "replay", replayed)
    return found, differing


IN_PLACE = "ExecuTorch writes the cache in place: calls do not return it."
COPIED = (
    "the cache is copied by each call: a file that writes it in place was left out: the example: it differs by 1.0e+00"
)
KERNELS = "kernels of xnnpack were left out: the example: it differs by 1.0e+00"
ORDER = [("xnnpack", True), ("xnnpack", False), ("portable", True), ("portable", False)]


@pytest.mark.parametrize(
    ("differing", "remarks"),
    [([], [IN_PLACE]), (ORDER[:1], [COPIED]), (ORDER[:2], [KERNELS, IN_PLACE]), (ORDER[:3], [KERNELS, COPIED])],
    ids=["passes", "in place", "XNNPACK", "XNNPACK and in place"],
)
def test_the_first_form_that_replays_is_written(exported, written, tmp_path, differing, remarks):
    found, differs = written
    differs.update(differing)
    report = exported.to_executorch(tmp_path / "model.pte")
    assert found == ORDER[: len(differing) + 1]
    assert report.remarks == remarks
    assert len(report.cases) == 1
    assert report.in_place == (["past_key_values.0.key"] if found[-1][1] else [])


def test_forms_and_kernels_that_are_asked_for_have_none_in_their_place(exported, written, tmp_path):
    report = exported.to_executorch(tmp_path / "model.pte", cache="returned")
    assert (written[0], report.remarks, report.in_place) == ([("xnnpack", False)], [], [])
    written[1].update(ORDER[:2])
    with pytest.raises(ReplayError, match="differs from the eager model"):
        exported.to_executorch(tmp_path / "model.pte", backend="xnnpack", cache="returned")
    report = exported.to_executorch(tmp_path / "model.pte", cache="returned")
    assert (written[0][-1], report.remarks) == (("portable", False), [KERNELS])
    with pytest.raises(InvalidArgumentError, match="backend must be one of"):
        exported.to_executorch(tmp_path / "other.pte", backend="cuda")


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_error_of_xnnpack_advises_what_can_be_written(exported, written, tmp_path, monkeypatch, quantize):
    """Portable kernels, and float weights, since no portable kernel reads quantized weights."""
    advice = "Leave quantize= out, and try the plain kernels" if quantize else r"\. Try the plain kernels"
    monkeypatch.setattr(executorch, "flat_program", lambda program: torch.ones(1) @ torch.ones(2))
    monkeypatch.setattr(runtimes, "write_pte", executorch.write_pte)
    monkeypatch.setattr(quantization, "require", lambda *_, **__: None)  # torchao
    with pytest.raises(FlattenError, match=advice + r'.*\n    backend="portable"'):
        exported.to_executorch(tmp_path / "model.pte", backend="xnnpack", cache="returned", quantize=quantize)


def test_quantized_weights_have_no_portable_kernels_and_the_remark_names_the_file_in_float(
    exported, written, tmp_path, monkeypatch
):
    """ExecuTorch has such kernels only in XNNPACK, also if the file in float has portable kernels."""
    with pytest.raises(InvalidArgumentError, match=r'contradicts quantize=.*\n    backend="xnnpack"'):
        exported.to_executorch(tmp_path / "model.pte", backend="portable", quantize="int8")
    assert written[0] == []
    written[1].update(ORDER[:2])
    monkeypatch.setattr(runtimes._Job, "quantize", lambda job, rewrite: None)
    monkeypatch.setattr(quantization, "require", lambda *_, **__: None)  # torchao
    report = exported.to_executorch(tmp_path / "model.pte", cache="returned", quantize="int8")
    assert report.remarks == [KERNELS.replace(":", " of the file before its weights were quantized:", 1)]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    pytest.importorskip("executorch.exir")
    place = tmp_path_factory.mktemp("executorch") / "llama"
    return export_folder(model, place, target="executorch", bounds={"batch": 12, "length": 600}, proof="sample")


@pytest.mark.slow
class TestFile(WritesIntoBuffers):
    file = "model.pte"

    def test_the_report_names_what_is_written_in_place(self, folder):
        super().test_the_report_names_what_is_written_in_place(folder)
        assert folder.reports[self.file].remarks[0] == IN_PLACE


def test_executorch_has_as_many_threads_as_are_asked_for(folder):
    """Its pool is one for the process; each of its threads would start others, which wait busily."""
    pool = importlib.import_module("executorch.extension.pybindings._C")
    for threads in (2, 1):
        opened = None  # without an open file the pool can be another
        opened = open_generator(folder.path, threads=threads)
        assert pool._threadpool_get_thread_count() == threads
    with pytest.raises(GenerationError, match=r"model\.pte is open with 1 threads\. Open the first .* threads=2"):
        open_generator(folder.path, threads=2)
    assert opened.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)


@pytest.mark.slow
def test_a_cache_is_filled_up_to_its_bound(model, folder):
    runner = open_runner(folder.path / "model.pte")
    ids = torch.randint(3, 128, (1, 601), generator=torch.Generator().manual_seed(3))
    cache = runner.cache({name: torch.zeros(1, 2, 0, 16) for name in runner.in_place})
    for first, last in ((0, 590), (590, 600)):
        feeds = {"input_ids": ids[:, first:last], "attention_mask": torch.ones(1, last, dtype=torch.int64)}
        feeds["position_ids"] = torch.arange(first, last)[None]
        found, cache = runner.step(feeds, cache)
    with torch.no_grad():
        wanted = model(ids[:, :600]).logits[:, -1]
    torch.testing.assert_close(found["logits"][:, -1], wanted, atol=1e-5, rtol=0)
    assert cache.shapes["past_key_values.0.key"] == (1, 2, 600, 16)


@pytest.fixture
def _executorch():
    pytest.importorskip("executorch.exir")
    # lowering imports them, and they register classes
    pytest.importorskip("torchao.quantization")
    pytest.importorskip("torchao.prototype.mx_formats")


@pytest.mark.slow
@pytest.mark.usefixtures("_executorch")
def test_a_loop_computes_in_every_size(tmp_path):
    axes = {0: Dim.AUTO(max=4), 1: Dim.AUTO(max=8)}
    shapes = {"decay": axes, "added": axes, "state": {0: axes[0]}}
    exported = export_program(Decay(), (), loop_inputs(2, 3), dynamic_shapes=shapes, cases=[])
    exported.to_executorch(tmp_path / "loop.pte", backend="portable")
    runner = open_runner(tmp_path / "loop.pte")
    for sizes in ((4, 8), (1, 1), (3, 5), (4, 1), (2, 8)):
        given = loop_inputs(*sizes)
        with torch.no_grad():
            expected = Decay()(**given)
        found = [runner.run(given)[name] for name in runner.outputs]
        torch.testing.assert_close(found, list(expected))


@pytest.mark.slow
@pytest.mark.usefixtures("_executorch")
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


if importlib.util.find_spec("transformers.integrations.moe"):
    importlib.import_module("transformers.integrations.moe")  # registers the operator


def _experts(self, rows, expert):
    """Rows sorted by expert, multiplied in groups, and put back: what transformers' mixtures do."""
    order = torch.argsort(expert, stable=True)
    counts = torch.histc(expert.float(), bins=4, min=0, max=3)
    ends = counts.cumsum(0).to(torch.int32)
    product = torch.ops.transformers.grouped_mm_fallback(rows[order], self.weight, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return product[back]


@pytest.mark.skipif(
    not hasattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback"),
    reason="this version of transformers has no grouped product",
)
def test_a_mixture_without_its_operators_computes_the_same_and_rows_after_the_last_expert_are_zeros():
    rows, experts = torch.randn(7, 5), torch.tensor([3, 0, 1, 0, 3, 3, 1])
    module = module_of(_experts, weight=torch.randn(4, 5, 6))
    free = {0: Dim.DYNAMIC}
    program = torch.export.export(module, (rows, experts), dynamic_shapes=(free, free)).run_decompositions({})
    found = written_out(program)
    names = {str(node.target) for node in found.graph.nodes}
    assert [n for n in names if any(word in n for word in ("grouped_mm", "sort", "histc", "empty"))] == []
    for count in (2, 7, 12):
        given = torch.randn(count, 5), torch.arange(count) % 3
        with torch.no_grad():
            torch.testing.assert_close(found.module()(*given), module(*given))
    plain = torch.export.export(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
    assert written_out(plain) is plain
    rows, weight, ends = torch.randn(6, 5), torch.randn(3, 5, 4), torch.tensor([2, 2, 5], dtype=torch.int32)
    expected = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    torch.testing.assert_close(grouped_product(rows, weight, ends), expected)


def test_the_inverse_of_erf_is_computed_without_its_operator():
    """From -1 to 1, where it is infinite; Gemma 3n cuts its activations off with it."""
    cut = module_class("Cut", lambda self, x: torch.erfinv(x))()
    program = written_out(torch.export.export(cut, (torch.zeros(3, 3),), dynamic_shapes=({0: Dim.DYNAMIC},)))
    assert [node for node in program.graph.nodes if "erfinv" in str(node.target)] == []
    given = torch.cat([torch.linspace(-1, 1, 21), torch.tensor([0.99, 0.9999, -0.99999, 1e-7, 0.0, -1e-3])]).view(9, 3)
    torch.testing.assert_close(program.module()(given), torch.erfinv(given), atol=1e-6, rtol=2e-6)


def test_memory_is_filled_before_it_is_written_to():
    """ExecuTorch would take its sizes from the example: A.X K2 puts keys together in it, and fits no longer cache."""

    def joined(self, x, y):
        found = x.new_empty(x.shape[0], 5)
        found[:, :3], found[:, 3:] = x, y
        return found + torch.empty(x.shape[0], 5, dtype=x.dtype).zero_()

    rows = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module_of(joined), (torch.ones(2, 3), torch.ones(2, 2)), dynamic_shapes=(rows, rows))
    found = written_out(program)
    assert [node for node in found.graph.nodes if "empty" in str(node.target)] == []
    given = torch.randn(7, 3), torch.randn(7, 2)
    torch.testing.assert_close(found.module()(*given), torch.cat(given, dim=1))
