"""Models that run eagerly in another thread while a block traces: what is in force in a trace is the tracer's alone."""

import copy
import sys
import threading

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.flatten.huggingface.tracing.one_graph import small_model
from tests.transformers_versions import needs_transformers
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, register_flattening_functions
from yobx_flatten.trace.trace_settings import PLAIN_ATTENTION

pytestmark = pytest.mark.slow

MISTRAL = ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8})
ROUNDS = 25
IDS = torch.arange(1, 13).reshape(2, 6)
MASK = torch.ones_like(IDS)


def generated(model):
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=12, do_sample=False).tolist()


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
        for size in range(2, 2 + ROUNDS):
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
