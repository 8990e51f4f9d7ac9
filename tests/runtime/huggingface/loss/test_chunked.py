"""A loss without all logits at once: in chunks of rows, or in slices of the head."""

import copy
import itertools
import weakref

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from matrix.models import make_model
from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.engine.parameters.host_table import HostSum, HostTable, TableAccess
from roundpipe_runtime.errors import LossError
from roundpipe_runtime.huggingface import SmoothedLoss
from roundpipe_runtime.huggingface.loss import sliced
from roundpipe_runtime.huggingface.loss.lazy_logits import LazyLogits, loss_only
from roundpipe_runtime.huggingface.loss.sliced import chunked_cross_entropy
from roundpipe_runtime.optim.layer_contents import Table
from tests.runtime.huggingface.hf_small import assert_like_plain, hf_batch, hf_model, wrapped
from tests.runtime.small import same_bits


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and nobody has let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen and storage._cdata not in inputs:
                    self._hold(storage)
        return result

    def _hold(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key, size) -> None:
        self._seen.discard(key)
        self.held -= size


def example(rows: int = 37, vocabulary: int = 50, width: int = 8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::5] = -100
    return hidden, weight, bias, labels


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def cap(values):
    return 3 * torch.tanh(values / 3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("transform", [None, cap])
@pytest.mark.parametrize("rows", [1, 10, 37, None])
def test_loss_and_gradients_are_those_of_all_logits(reduction, smoothing, transform, rows):
    hidden, weight, bias, labels = example()
    logits = functional.linear(hidden, weight, bias)
    logits = logits if transform is None else transform(logits)
    expected = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    options = {"bias": bias, "reduction": reduction, "transform": transform, "label_smoothing": smoothing}
    found = chunked_cross_entropy(hidden, weight, labels, rows=rows, **options)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(gradients(2 * found, hidden, weight, bias), gradients(2 * expected, hidden, weight, bias),
                          strict=True):  # fmt: skip
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-14)


def test_only_what_learns_has_a_gradient():
    hidden, weight, _, labels = example()
    (found,) = gradients(chunked_cross_entropy(hidden, weight.detach(), labels), hidden)
    (expected,) = gradients(functional.cross_entropy(hidden @ weight.detach().T, labels), hidden)
    assert torch.allclose(found, expected, rtol=1e-10)
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad


def test_going_back_again_gives_the_same():
    hidden, weight, bias, labels = example()
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, rows=10, transform=cap)
    first = torch.autograd.grad(3 * loss, (hidden, weight, bias), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    third = torch.autograd.grad(loss, (hidden, weight, bias))
    for one, other, last in zip(first, again, third, strict=True):
        assert torch.allclose(one, 3 * other, rtol=1e-12)
        assert torch.equal(other, last)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_half_precision_is_summed_wide():
    """In bfloat16 the loss is in float32, and gradients are as close as rounding lets the plain ones be."""
    hidden, weight, _, labels = example(rows=200, dtype=torch.float32)
    exact = gradients(functional.cross_entropy(hidden @ weight.T, labels), hidden, weight)
    short = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    loss = chunked_cross_entropy(*short, labels, rows=50)
    assert loss.dtype == torch.float32
    for found, expected in zip(gradients(loss, *short), exact, strict=True):
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_under_autocast():
    hidden, weight, bias, labels = example(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, labels, bias=bias, rows=10)
        expected = functional.cross_entropy(functional.linear(hidden, weight, bias).float(), labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(gradients(found, hidden, weight, bias), gradients(expected, hidden, weight, bias),
                          strict=True):  # fmt: skip
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("is_table", [False, True])
def test_labels_that_are_all_ignored_give_no_gradient(is_table, device):
    """A mean over nothing is NaN, as torch's is, and its gradients are zeros."""
    hidden, weight, _, labels = example()
    head = table_of(weight.detach(), device, 5) if is_table else weight
    loss = chunked_cross_entropy(hidden, head, torch.full_like(labels, -100))
    assert loss.isnan()
    loss.backward()
    assert not hidden.grad.any()
    assert not (head.access.pop_sum().total if is_table else weight.grad).any()


def test_wrong_arguments_are_errors():
    hidden, weight, _, labels = example()
    with pytest.raises(LossError, match=r"found \(37, 8\), \(50, 8\) and \(36,\)"):
        chunked_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(LossError, match="none"):
        chunked_cross_entropy(hidden, weight, labels, reduction="none")


SMOOTHED = SmoothedLoss(0.1, shift_labels=False)
LOSSES = {
    "plain": (chunked_cross_entropy, lambda h, w, y: functional.cross_entropy(h @ w.T, y)),
    "smoothed": (
        lambda h, w, y: SMOOTHED.of_logits(LazyLogits(h, (w, None)), y),
        lambda h, w, y: LabelSmoother(0.1)((h @ w.T,), y),
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_quarter_of_the_memory(kind):
    """2 k tokens, 256 k words: at most a quarter of the plain peak. Tensors on `meta` have sizes, and no memory."""
    peaks = []
    for loss_of in LOSSES[kind]:
        hidden = torch.randn(2048, 16, device="meta").requires_grad_()
        weight = torch.randn(256_000, 16, device="meta").requires_grad_()
        labels = torch.zeros(2048, dtype=torch.int64, device="meta")
        with Memory() as memory:
            gradients(loss_of(hidden, weight, labels), hidden, weight)
        peaks.append(memory.peak)
    chunked, plain = peaks
    assert plain >= 2 * 2048 * 256_000 * 4  # logits and their gradient: the measure sees them
    assert chunked <= 0.25 * plain


def test_the_gradient_of_the_weight_is_there_once():
    """Memory holds the gradient of a head of a real model's size once, and chunks of logits; `meta` has sizes only."""
    hidden = torch.randn(2048, 2048, device="meta").requires_grad_()
    weight = torch.randn(256_000, 2048, device="meta").requires_grad_()
    labels = torch.zeros(2048, dtype=torch.int64, device="meta")
    with Memory() as memory:
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), (hidden, weight))
    assert memory.peak >= weight.nbytes + hidden.nbytes  # gradients: the measure sees them
    assert memory.peak <= weight.nbytes + 2 * hidden.nbytes + 4 * 2**26 * 4  # and not the logits of all tokens


# A plain head; tied weights; soft caps; scales of logits; heads with a bias; experts
MODELS = ["llama", "gpt2", "gemma2", "gemma3_text", "cohere", "granite", "phi", "gptj", "bloom", "mixtral", "opt"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [True, False])
def test_models_learn_the_same(name, cut, everything_is_large, computed):
    padding = name not in ("gemma2", "bloom")  # whose loss padding on the left makes NaN
    assert_like_plain(hf_model(name), hf_batch(padding=padding), use_sequential_preset=cut)
    assert not computed


def test_a_microbatch_of_ignored_labels_and_a_count_of_the_script(everything_is_large):
    batch = hf_batch(3)
    batch["labels"][1] = -100
    assert_like_plain(hf_model("llama"), batch)
    assert_like_plain(hf_model("llama"), {**batch, "num_items_in_batch": 17})


def test_whoever_looks_at_logits_gets_them(everything_is_large):
    model = hf_model("llama")
    plain = copy.deepcopy(model)
    batch = hf_batch()
    pipeline = wrapped(model)
    seen = []

    def loss_fn(outputs, _):
        if torch.is_grad_enabled():  # else it is being checked
            seen.append(outputs.logits.shape)
        return outputs.loss

    pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn)
    _, outputs = pipeline.forward_backward(input_kwargs=batch, return_outputs=True)
    assert seen == [(2, 10, 128), (2, 10, 128), (1, 10, 128)]
    assert torch.allclose(outputs.logits, plain(**batch).logits, rtol=1e-9)


def test_small_logits_are_computed_as_the_model_does():
    model, batch = make_model("llama"), hf_batch()
    expected = copy.deepcopy(model)(**batch).loss
    assert wrapped(model, microbatches=1).forward_backward(input_kwargs=batch).item() == expected.item()


class Own(torch.nn.Module):
    def __init__(self, between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 6).double(), torch.nn.Linear(6, 9).double()
        self.between = between

    def get_output_embeddings(self):
        return self.head

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        flat = logits.view(-1, 9)
        changed = self.between(logits)
        flat = flat if changed is None else changed.reshape(-1, 9)
        return {"loss": functional.cross_entropy(flat, labels.flatten()), "logits": changed}


def write(logits):
    logits[..., 3] = -5.0


def write_into_a_view(logits):
    logits[0].mul_(2.0)


def scale_in_place(logits):
    logits *= 2.0


BETWEEN = {
    "nothing": lambda logits: logits,
    "cap": lambda logits: 5.0 * torch.tanh(logits / 5.0),
    "number first": lambda logits: 0.5 * logits,
    "wider": lambda logits: logits.to(torch.float64).contiguous(),
    "another token's": lambda logits: logits + logits.flip(1),
    "a mask": lambda logits: logits.masked_fill(torch.arange(9) == 2, -1e4),
    "softmax": lambda logits: logits.softmax(-1),
    "a number by tokens": lambda logits: logits * logits.mean(),
    "some columns": lambda logits: logits[..., :9],
    "written": write,
    "written into a view": write_into_a_view,
    "scaled in place": scale_in_place,
    "written by name": lambda logits: logits.clamp_(-1, 1),
    "below torch functions": lambda logits: torch.ops.aten.mul.Tensor(logits, logits),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_is_done_to_logits_is_done(name, everything_is_large):
    model = Own(BETWEEN[name])
    x, labels = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(0, 9, (2, 5))
    expected = model(x, labels)["loss"]
    found = loss_only(model, lambda: model(x, labels))["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    parameters = list(model.parameters())
    for one, other in zip(gradients(found, *parameters), gradients(expected, *parameters), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: functional.cross_entropy(logits, labels, weight=torch.arange(50.0).double()),
        lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none").sum(),
        lambda logits, labels: functional.cross_entropy(logits, functional.one_hot(labels.clamp(min=0), 50).double()),
        lambda logits, labels: functional.cross_entropy(logits.to(torch.bfloat16), labels),
        lambda logits, labels: functional.cross_entropy(logits.to(dtype=torch.float32), labels),
        lambda logits, labels: functional.cross_entropy(logits.reshape(37, 50, 1), labels[:, None]),
        lambda logits, labels: logits.logsumexp(dim=-1).mean(),
    ],
    ids=["classes weighted", "not reduced", "probabilities", "bfloat16", "by keyword", "classes inside", "no loss"],
)
def test_what_is_no_plain_loss_has_all_logits(loss):
    hidden, weight, bias, labels = example()
    late = LazyLogits(hidden, (weight, bias))
    found, expected = loss(late, labels), loss(functional.linear(hidden, weight, bias), labels)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert same_bits(gradients(found, hidden, weight), gradients(expected, hidden, weight))


@pytest.fixture
def device():
    made = VirtualDevice(check=True)
    yield made
    made.close()


def table_of(weight, device, rows):
    new_sum = lambda: HostSum(torch.empty_like(weight, device="meta"))  # noqa: E731 # of an argument
    access = TableAccess(device, weight, Table(rows, is_head=True), requires_grad=True, new_sum=new_sum)
    return HostTable(access, requires_grad=True)


@pytest.mark.parametrize(
    ("rows", "chunk", "smoothing", "transform", "reduction"),
    [*itertools.product((1, 5, 23, 64), (2**26, 7), (0.0, 0.2), (None, cap), ("mean",)), (5, 7, 0.2, cap, "sum")],
)
def test_loss_and_gradients_are_those_of_torch(rows, chunk, smoothing, transform, reduction, device, monkeypatch):
    monkeypatch.setattr(sliced, "_MOST", chunk)
    hidden, weight, bias, labels = example(11, 23, 6)
    logits = functional.linear(hidden, weight, bias)
    logits = logits if transform is None else transform(logits)
    expected = functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    table = table_of(weight.detach(), device, rows)
    loss = chunked_cross_entropy(
        hidden, table, labels, bias=bias, transform=transform, reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected)
    of_hidden, of_bias = gradients(3 * loss, hidden, bias)
    of_table = table.access.pop_sum()
    of_table.result()
    for found, other in zip(
        (of_hidden, of_table.total, of_bias), gradients(3 * expected, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(found, other)
