"""Packages, compiled code, stored programs, and models in another thread: called as traced, inside a block."""

import copy
import os
import shutil
import sys
import threading
import typing
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from torch.export import Dim
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.flatten.huggingface.tracing.one_graph import small_model
from tests.modules import module_class, module_of
from tests.transformers_versions import needs_transformers
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, make_dynamic_cache, register_flattening_functions
from yobx_flatten.trace.program import called_contiguous, importing_classes, remembering_expressions, remembering_hints
from yobx_flatten.trace.trace_settings import PLAIN_ATTENTION

# dynamo goes through a cached function as if it were not cached, and says so; ours return the same again and again
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:While compiling, we found certain side effects:UserWarning"  # transformers' own, of the models
    ),
]
compiles = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler"
)


class Step(torch.nn.Module):
    def forward(self, x, cache):
        places = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None]
        total = (x * (1 + places)).sum((1, 2, 3))
        for index in range(2):
            keys, values = cache.update(x, x, index)
            total = total + (keys.cumsum(2) * 2 + values.cumsum(2)).sum((1, 2, 3))
        return total


def inputs(*, batch, past, new, sliced):
    def made(seed, length):
        tensor = torch.randn(batch, 2, length + 3, 4, generator=torch.Generator().manual_seed(seed))[:, :, 3:]
        return tensor if sliced else tensor.contiguous()

    window = min(past, 7)
    pairs = [(made(1, past), made(2, past)), (made(3, window), made(4, window))]
    cache = make_dynamic_cache(pairs, ["DynamicLayer", "DynamicSlidingWindowLayer"], [{}, {"sliding_window": 8}])
    cache.layers[1].cumulative_length = past
    return {"x": made(5, new), "cache": cache}


def compiled(program, path):
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))
    return torch._inductor.aoti_load_package(os.fspath(path))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    example = inputs(batch=2, past=9, new=3, sliced=True)
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(Step(), (), copy.deepcopy(example), dynamic_shapes=dynamic_shapes(example))
        return compiled(program, tmp_path_factory.mktemp("package") / "step.pt2")


@compiles
@pytest.mark.parametrize("sliced", [False, True], ids=["contiguous", "slices"])
@pytest.mark.parametrize(("batch", "past", "new"), [(2, 9, 3), (3, 5, 2), (4, 21, 6)])
def test_a_package_is_right_for_slices(package, batch, past, new, sliced):
    given = inputs(batch=batch, past=past, new=new, sliced=sliced)
    expected = Step()(**copy.deepcopy(given))
    with register_flattening_functions(patch_transformers=True):
        found = package(**given)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@compiles
def test_a_package_that_was_compiled_elsewhere_is_called_as_it_was(tmp_path):
    add = module_class("Add", lambda self, x: x * 2 + torch.arange(x.shape[1]))()
    x = torch.arange(12.0).reshape(2, 6)[:, 2:]
    package = compiled(torch.export.export(add, (x,)), tmp_path / "add.pt2")
    with register_flattening_functions():
        assert package(x).tolist() == add(x).tolist()


class Package:
    def __init__(self, loader):
        self.loader = loader

    def get_metadata(self):
        return {"yobx_flatten.contiguous": "10"}

    def __call__(self, *args):
        return self.loader.boxed_run(list(args))


def test_an_input_that_was_strided_in_the_example_stays_so():
    """Only what was contiguous for the trace is made so; too many inputs go on to the package, which refuses them."""
    loader = SimpleNamespace(boxed_run=lambda inputs: [tensor.stride() for tensor in inputs])
    strided = torch.zeros(3, 4).T
    call = called_contiguous(Package.__call__)
    assert call(Package(loader), strided, strided, strided) == [(3, 1), (1, 4), (1, 4)]


def _joined(self, x, y):
    joined = torch.cat([x, y, x])
    chosen = torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h.sin(), (joined,))
    return chosen, joined.reshape(-1, 6)[1:], torch.arange(x.shape[0] + y.shape[0])


@pytest.mark.slow  # exports a branch
def test_a_program_is_the_one_that_torch_loads(tmp_path):
    rows = {0: Dim("rows", min=2, max=64) * 2}
    example = (torch.ones(4, 3), torch.ones(6, 3))
    program = torch.export.export(module_of(_joined), example, dynamic_shapes=(rows, {0: Dim("more", min=2) * 2}))
    torch.export.save(program, tmp_path / "joined.pt2")
    plain = torch.export.load(tmp_path / "joined.pt2")
    with register_flattening_functions():
        found = torch.export.load(tmp_path / "joined.pt2")
    assert str(found) == str(plain)
    for one, other in zip(found.graph.nodes, plain.graph.nodes, strict=True):
        assert str(one.meta.get("val")) == str(other.meta.get("val"))
    given = torch.randn(8, 3), torch.randn(12, 3)
    for one, other in zip(found.module()(*given), module_of(_joined)(*given), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(AssertionError, match="Guard failed"):
        found.module()(torch.ones(130, 3), torch.ones(6, 3))


def test_a_text_is_parsed_once_for_a_program_and_an_example_size_and_the_types_of_fields_once_for_a_class():
    parsed = []

    class Deserializer:
        @remembering_expressions
        def parse(self, text, hint=None):
            parsed.append((text, hint))
            return object()

    loader = Deserializer()
    loader.symbol_name_to_symbol = {}
    first = loader.parse("s0 + 1", 5)
    assert loader.parse("s0 + 1", 5) is first
    loader.parse("s0 + 1")
    assert parsed == [("s0 + 1", 5), ("s0 + 1", None)]
    loader.symbol_name_to_symbol = {}
    assert loader.parse("s0 + 1", 5) is not first
    asked = []

    def get_type_hints(obj, *given, **options):
        asked.append(obj)
        return typing.get_type_hints(obj, *given, **options)

    pair = type("Pair", (), {"__annotations__": {"left": "int", "right": "list[Left]"}})
    remembering = remembering_hints(SimpleNamespace(**{**vars(typing), "get_type_hints": get_type_hints}))
    names = {"Left": str}
    for _ in range(2):
        assert remembering.get_type_hints(pair, globalns=names) == {"left": int, "right": list[str]}
    assert asked == [pair]
    assert remembering.get_type_hints(pair, {"Left": bytes})["right"] == list[bytes]
    assert remembering.get_type_hints(get_type_hints) == {}
    assert remembering.get_origin is typing.get_origin


def test_the_modules_of_unknown_classes_are_imported_whatever_torch_says_of_them(tmp_path, monkeypatch):
    """Before torch reads the specification, and of no library but those that are served."""
    for name in ("served_library", "other_library"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    classes = ("served_library.Output", "other_library.Output", "builtins.dict")
    leaf = {"type": None, "context": None, "children_spec": []}
    below = [{"type": name, "context": "[]", "children_spec": [leaf]} for name in classes]
    read = importing_classes(
        lambda schema: sorted({"served_library", "other_library"} & set(sys.modules)), lambda: ["served_library"]
    )
    found = read({"type": "builtins.tuple", "context": "null", "children_spec": below})
    sys.modules.pop("served_library", None)
    assert found == ["served_library"]


MISTRAL = ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8})
IDS = torch.arange(1, 13).reshape(2, 6)


def generated(model):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=12, do_sample=False).tolist()


class Beside(torch.nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = lambda: work  # not a tensor, module or parameter that the trace would look into
        self.found = lambda: found
        found = []

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.found().append(self.work()()))
        thread.start()
        thread.join()
        return x + 1


@needs_transformers("5.0", "masks are made by vmap, which torch does in one thread only while it traces")
def test_a_model_in_another_thread_is_not_touched_by_a_trace():
    model = copy.deepcopy(small_model(*MISTRAL))
    expected, held = generated(model), sorted(vars(DynamicSlidingWindowLayer(8)))
    beside = Beside(lambda: (generated(model), sorted(vars(DynamicSlidingWindowLayer(8)))))
    with register_flattening_functions(patch_transformers=True):
        torch.export.export(beside, (torch.zeros(2),))
    assert beside.found() == [(expected, held)]


@needs_transformers("5.0", "masks are made by vmap, which torch does in one thread only while it traces")
def test_eager_models_and_exports_run_beside_each_other():
    model = copy.deepcopy(small_model(*MISTRAL))
    expected, over, errors, done = generated(model), threading.Event(), [], []

    def generate():
        while not over.is_set():
            try:
                done.append(generated(model) == expected)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=generate) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    for thread in threads:
        thread.start()
    try:
        for size in range(2, 27):
            net = torch.nn.Sequential(torch.nn.Linear(size, 4), torch.nn.ReLU())
            example = torch.ones(2, size)
            with register_flattening_functions(patch_transformers=True):
                program = torch.export.export(net, (example,))
            torch.testing.assert_close(program.module()(example), net(example))
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert done
    assert all(done)


@needs_transformers("5.0", "masks are made by vmap, which torch does in one thread only while it traces")
def test_an_export_beside_eager_models_serves_all_lengths():
    eager, traced = (copy.deepcopy(small_model(*MISTRAL)) for _ in range(2))
    over = threading.Event()

    def generate():
        while not over.is_set():
            generated(eager)

    thread = threading.Thread(target=generate)
    thread.start()
    example = decode_inputs(traced, DecodeSizes(past=5))
    try:
        with register_flattening_functions(patch_transformers=True):
            program = torch.export.export(traced, (), copy.deepcopy(example), dynamic_shapes=dynamic_shapes(example))
    finally:
        over.set()
        thread.join()
    longer = decode_inputs(traced, DecodeSizes(batch=3, past=17))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        found = program.module()(**copy.deepcopy(longer)).logits
    torch.testing.assert_close(found, traced(**longer).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in turn", "nested"])
def test_traces_that_overlap_put_the_choice_of_kernels_back(order):
    """torch keeps it for the process: whichever of two traces ends last, what was found comes back."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    before = _cur_sdpa_kernel_backends()
    go_on = [threading.Event(), threading.Event()]
    inside = [threading.Event(), threading.Event()]

    def trace(number):
        with PLAIN_ATTENTION:
            inside[number].set()
            assert go_on[number].wait(30)

    threads = [threading.Thread(target=trace, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(30)
    during = _cur_sdpa_kernel_backends()
    for number in order:
        go_on[number].set()
        threads[number].join()
    assert (len(during), _cur_sdpa_kernel_backends()) == (1, before)


FULL, SLIDING = ("DynamicLayer", {}), ("DynamicSlidingWindowLayer", {"sliding_window": 8})


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="dynamo of torch 2.11 does not read the attributes of a layer")
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([FULL], id="one layer"),
        pytest.param([FULL] * 3, id="of one kind"),
        pytest.param([SLIDING] * 2, id="sliding"),
        pytest.param([FULL, SLIDING] * 2, id="in turn"),
        pytest.param([SLIDING, SLIDING, FULL, SLIDING, FULL], id="in no order"),
    ],
)
def test_compiled_code_takes_a_cache_apart_in_one_graph(layers):
    pairs = [(torch.full((1, 2, 3, 4), 1.0 + i), torch.full((1, 2, 3, 4), 10.0 + i)) for i in range(len(layers))]
    cache = make_dynamic_cache(pairs, *map(list, zip(*layers, strict=True)))

    @torch.compile(backend="eager", fullgraph=True)
    def double(cache):
        return pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, cache)

    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(cache)  # the first time writes functions, which dynamo does not follow
        pytree.tree_unflatten(leaves, spec)
        found = double(cache)
    values = [(layer.keys.unique().tolist(), layer.values.unique().tolist()) for layer in found.layers]
    assert values == [([2.0 + 2 * i], [20.0 + 2 * i]) for i in range(len(layers))]
    assert [type(layer).__name__ for layer in found.layers] == [name for name, _ in layers]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="dynamo of torch 2.11 does not follow what rebuilds a cache")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("LlamaConfig", "LlamaForCausalLM"), id="llama", marks=pytest.mark.extended),
        pytest.param(("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}), id="mistral"),
    ],
)
def test_a_strict_export_serves_other_lengths(names):
    model = small_model(*names)
    example = decode_inputs(model, DecodeSizes())
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(
            model,
            (),
            copy.deepcopy(example),
            dynamic_shapes=dynamic_shapes(example),
            strict=True,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        for sizes in (DecodeSizes(batch=3, past=4, new=2), DecodeSizes(batch=1, past=17, new=1, padding=3)):
            inputs = decode_inputs(model, sizes, seed=1)
            expected = model(**copy.deepcopy(inputs)).logits
            torch.testing.assert_close(program.module()(**inputs).logits, expected, atol=1e-5, rtol=0)
