"""Operators of PyTorch with an example and values unlike it: the cases of ``make operators``.

The values are hard where translations are often wrong: zeros of both signs, negative numbers, infinities, NaN, ties,
integers at both ends, masks with a row that sees nothing, near points. Eager PyTorch has the right values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

__all__ = ["Operator", "Values", "operators"]

INF, NAN = float("inf"), float("nan")
Inputs = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Values:
    """Values unlike those of the example.

    Attributes:
        name: what is unlike.
        inputs: the arguments.
    """

    name: str
    inputs: Inputs


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator, with what it is called with.

    Attributes:
        name: a name that no other one has.
        kind: the group that it is shown in.
        function: calls it.
        example: the arguments that it is exported with.
        others: values unlike those.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    example: Inputs
    others: tuple[Values, ...]

    def module(self) -> torch.nn.Module:
        """Return a module that calls it; its class is named as the operator."""
        function = self.function
        names = [f"x{index}" for index in range(len(self.example))]
        scope: dict[str, Any] = {"function": function}
        arguments = ", ".join(names)
        exec(f"def forward(self, {arguments}):\n    return function({arguments})", scope)
        kind = type(self.name.replace(" ", "_"), (torch.nn.Module,), {"forward": scope["forward"]})
        return kind()  # type: ignore[no-any-return]


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers from 0.5 to 1.5: no zeros, and one sign."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def signed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of both signs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return integers from ``low`` to ``high``, which is not among them."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def row(*values: float) -> torch.Tensor:
    """Return a tensor of shape (1, n)."""
    return torch.tensor([values])


EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30)


def of_one(size: int = 4) -> tuple[Values, ...]:
    """Return values for operators of one tensor of two axes."""
    return (
        Values("signs", (signed(5, size, seed=3),)),
        Values("edges", (torch.tensor(EDGES).reshape(-1, 1).expand(-1, size).contiguous(),)),
        Values("infinities", (torch.tensor([[INF] * size, [-INF] * size, [1.0] * size]),)),
        Values("NaN", (torch.tensor([[NAN, *[1.0] * (size - 1)], [*[2.0] * (size - 1), NAN]]),)),
        Values("ties", (torch.tensor([[1.0] * size, [0.0] * size, [-1.0] * size]),)),
        Values("one row", (floats(1, size, seed=9),)),
    )


def of_two() -> tuple[Values, ...]:
    """Return values for operators of two tensors of one shape: each edge with each."""
    edges = torch.tensor((*EDGES[:10], INF, -INF, NAN))
    first, second = torch.meshgrid(edges, edges, indexing="ij")
    return (
        Values("signs", (signed(5, 4, seed=3), signed(5, 4, seed=4))),
        Values("edges", (first[:10, :10].contiguous(), second[:10, :10].contiguous())),
        Values("infinities and NaN", (first.contiguous(), second.contiguous())),
    )


def _unary() -> Iterator[Operator]:
    names = (
        "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac isfinite isinf "
        "isnan lgamma log log10 log1p log2 logit neg reciprocal round rsqrt sigmoid sign signbit sin sinc sinh sqrt "
        "square tan tanh trunc deg2rad digamma nan_to_num"
    )
    for name in names.split():
        yield Operator(name, "of one number", getattr(torch, name), (floats(3, 4),), of_one())
    activations = (
        "relu relu6 gelu silu mish elu selu celu softplus softsign hardtanh hardswish hardsigmoid leaky_relu "
        "logsigmoid tanhshrink hardshrink softshrink"
    )
    for name in activations.split():
        yield Operator(name, "activation", getattr(functional, name), (floats(3, 4),), of_one())
    more: dict[str, Callable[..., Any]] = {
        "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "clamp": lambda x: x.clamp(-0.5, 1.0),
        "clamp_min": lambda x: x.clamp_min(0.75),
        "round decimals": lambda x: torch.round(x, decimals=1),
        "pow 2": lambda x: x**2,
        "pow 0.5": lambda x: x**0.5,
        "pow -1": lambda x: x**-1,
        "scalar pow": lambda x: 2.0**x,
        "threshold": lambda x: functional.threshold(x, 0.7, 3.0),
        "glu": lambda x: functional.glu(x, -1),
        "to int64": lambda x: x.clamp(-1e4, 1e4).nan_to_num().to(torch.int64),
        "to bool": lambda x: x.to(torch.bool),
        "remainder 0.3": lambda x: torch.remainder(x, 0.3),
        "floor divide 0.5": lambda x: torch.floor_divide(x, 0.5),
        "special.xlogy": lambda x: torch.special.xlogy(x, x),
        "entr": torch.special.entr,
        "i0": torch.i0,
        "ndtr": torch.special.ndtr,
        "log_ndtr": torch.special.log_ndtr,
    }
    for name, function in more.items():
        yield Operator(name, "of one number", function, (floats(3, 4),), of_one())


def _binary() -> Iterator[Operator]:
    names = "add sub mul div atan2 fmod remainder floor_divide maximum minimum fmax fmin hypot copysign pow logaddexp"
    more = "logaddexp2 eq ne lt le gt ge isclose xlogy nextafter heaviside dist"
    for name in f"{names} {more}".split():
        yield Operator(name, "of two numbers", getattr(torch, name), (floats(3, 4), floats(3, 4, seed=1)), of_two())
    for name in ("trunc", "floor"):
        function = functools.partial(torch.div, rounding_mode=name)
        yield Operator(f"div {name}", "of two numbers", function, (floats(3, 4), floats(3, 4, seed=1)), of_two())
    ends = (
        Values("signs", (torch.tensor([[7, -7, 7, -7, 0, -1]]), torch.tensor([[2, 2, -2, -2, 3, 4]]))),
        Values("large", (torch.tensor([[2**40 + 1, -(2**40) - 1, 2**53 + 1]]), torch.tensor([[3, 3, 2]]))),
    )
    example = (integers(1, 9, 2, 6), integers(1, 9, 2, 6, seed=1))
    for name in ("add", "mul", "floor_divide", "remainder", "fmod", "maximum", "gcd", "bitwise_and", "bitwise_xor"):
        yield Operator(f"{name} int64", "of integers", getattr(torch, name), example, ends)
    shifts = (Values("signs", (torch.tensor([[7, -7, 1, -1]]), torch.tensor([[1, 1, 3, 3]]))),)
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        yield Operator(name, "of integers", getattr(torch, name), (integers(1, 9, 2, 4), integers(0, 3, 2, 4)), shifts)
    one = (Values("signs", (torch.tensor([[5, -5, 0, 2**40 + 1]]),)),)
    for name in ("abs", "neg", "sign", "bitwise_not"):
        yield Operator(f"{name} int64", "of integers", getattr(torch, name), (integers(1, 9, 2, 4),), one)
    yield Operator("mean of ints", "of integers", lambda x: x.float().mean(-1), (integers(1, 9, 2, 4),), one)
    yield Operator("true divide int64", "of integers", torch.true_divide, example, ends)
    yield Operator("lerp", "of two numbers", torch.lerp, (floats(3, 4), floats(3, 4, seed=1), floats(3, 4, seed=2)), ())
    yield Operator("addcdiv", "of two numbers", torch.addcdiv, (signed(3, 4), floats(3, 4), floats(3, 4, seed=1)), ())
    yield Operator(
        "where", "of two numbers", lambda c, x, y: torch.where(c > 0.9, x, y), (floats(3, 4),) * 3,
        (Values("NaN in the other branch", (row(0.0, 2.0), row(NAN, 1.0), row(1.0, NAN))),),
    )  # fmt: skip


def _reductions() -> Iterator[Operator]:
    names = "sum mean prod amax amin logsumexp std var argmax argmin cumsum cumprod logcumsumexp median"
    plain = "softmax log_softmax nansum nanmean any all count_nonzero"
    for name in f"{names} {plain}".split():
        yield Operator(
            name, "along an axis", functools.partial(getattr(torch, name), dim=-1), (floats(3, 4),), of_one()
        )
    more: dict[str, Callable[..., Any]] = {
        "max": lambda x: x.max(-1),
        "min": lambda x: x.min(-1),
        "cummax": lambda x: x.cummax(-1),
        "cummin": lambda x: x.cummin(-1),
        "aminmax": lambda x: torch.aminmax(x, dim=-1),
        "mode": lambda x: x.mode(-1),
        "kthvalue": lambda x: x.kthvalue(2, -1)[0],
        "nanmedian": lambda x: x.nanmedian(-1),
        "quantile": lambda x: x.quantile(0.3, dim=-1),
        "norm 2": lambda x: torch.linalg.vector_norm(x, 2, dim=-1),
        "norm 1": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
        "norm inf": lambda x: torch.linalg.vector_norm(x, INF, dim=-1),
        "norm 0": lambda x: torch.linalg.vector_norm(x, 0, dim=-1),
        "normalize": lambda x: functional.normalize(x, dim=-1),
        "var uncorrected": lambda x: x.var(-1, correction=0),
        "max of all": torch.max,
        "argmax of all": torch.argmax,
        "softmin": lambda x: functional.softmin(x, -1),
        "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
        "diff": lambda x: x.diff(dim=-1),
        "trapezoid": lambda x: torch.trapezoid(x, dim=-1),
        "layer_norm": lambda x: functional.layer_norm(x, (4,)),
        "rms_norm": lambda x: functional.rms_norm(x, (4,), eps=1e-6),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(1, -1),
        "tril": lambda x: x.tril(1),
        "triu": lambda x: x.triu(1),
        "unfold": lambda x: x.unfold(1, 2, 1),
        "sort stable": lambda x: torch.sort(x, stable=True, dim=-1),
        "sort": lambda x: torch.sort(x, dim=-1)[0],
        "topk values": lambda x: x.topk(2, -1)[0],
        "argsort stable": lambda x: torch.argsort(x, dim=-1, stable=True),
        "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 1.0])),
        "bucketize right": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 1.0]), right=True),
        "histc-free one_hot": lambda x: functional.one_hot((x.nan_to_num().clamp(0, 3)).to(torch.int64), 4),
        "chunk": lambda x: x.chunk(2, 0)[0],
        "view as int32": lambda x: x.view(torch.int32),
        "nonzero": torch.nonzero,
        "masked_select": lambda x: x[x > 0.7],
        "unique": lambda x: torch.unique(x.nan_to_num().clamp(-3, 3)),
        "isin": lambda x: torch.isin(x, torch.tensor([1.0, 0.0])),
        "cosine_similarity with itself": lambda x: functional.cosine_similarity(x, x.flip(0), dim=-1),
    }
    for name, function in more.items():
        yield Operator(name, "along an axis", function, (floats(3, 4),), of_one())
    searched = (
        Values("at and beyond the ends", (torch.tensor([-1.0, 0.0, 0.0, 2.0]), row(-2.0, -1.0, 0.0, 2.0, 3.0))),
    )
    sorted_four = torch.tensor([0.1, 0.2, 0.3, 0.4])
    yield Operator("searchsorted", "along an axis", torch.searchsorted, (sorted_four, floats(2, 3)), searched)
    yield Operator(
        "searchsorted right", "along an axis", functools.partial(torch.searchsorted, right=True),
        (sorted_four, floats(2, 3)), searched,
    )  # fmt: skip


def _losses() -> Iterator[Operator]:
    logits, target = (row(INF, -INF, 100.0, -100.0, 0.0, -0.0), row(1.0, 0.0, 1.0, 0.0, 1.0, 0.0))
    hard = (
        Values("infinities on the right side", (logits[:, :2], target[:, :2])),
        Values("large", (logits[:, 2:], target[:, 2:])),
        Values("large and wrong", (logits[:, 2:], 1 - target[:, 2:])),
        Values("infinities on the wrong side", (logits[:, :2], 1 - target[:, :2])),
    )
    half = torch.full((2, 6), 0.5)
    weights = {
        "bce with logits": {},
        "bce with logits, weights": {"weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0])},
        "bce with logits, weights of positives": {"pos_weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0])},
        "bce with logits, sum": {"reduction": "sum"},
        "bce with logits, none": {"reduction": "none"},
    }
    for name, options in weights.items():
        narrow = (Values(v.name, tuple(torch.cat([x, x, x], -1)[:, :6] for x in v.inputs)) for v in hard)
        function = functools.partial(functional.binary_cross_entropy_with_logits, **options)  # type: ignore[arg-type]
        yield Operator(name, "loss", function, (floats(2, 6), half), tuple(narrow))
    ends = (Values("0 and 1", (row(0.0, 1.0, 0.0, 1.0), row(0.0, 1.0, 1.0, 0.0))),)
    yield Operator("bce", "loss", functional.binary_cross_entropy, (floats(2, 4) / 2, floats(2, 4) / 2), ends)
    scores = (signed(4, 5), integers(0, 5, 4))
    labels = (
        Values("ignored labels", (signed(3, 5, seed=2), torch.tensor([-100, 2, -100]))),
        Values("large scores", (1e4 * signed(3, 5, seed=2), torch.tensor([0, 4, 2]))),
        Values("minus infinity elsewhere", (torch.tensor([[-INF, 0.0, 1.0, 2.0, 3.0]]), torch.tensor([3]))),
    )
    for name, options in (
        ("cross entropy", {}),
        ("cross entropy, smoothed", {"label_smoothing": 0.1}),
        ("cross entropy, weights", {"weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])}),
        ("cross entropy, none", {"reduction": "none"}),
    ):
        yield Operator(name, "loss", functools.partial(functional.cross_entropy, **options), scores, labels)  # type: ignore[arg-type]
    pairs = of_two()[:2]
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield Operator(name, "loss", getattr(functional, name), (floats(3, 4), floats(3, 4, seed=1)), pairs)
    yield Operator(
        "kl_div", "loss", functools.partial(functional.kl_div, reduction="batchmean"),
        (signed(2, 4), floats(2, 4)), (Values("zeros", (row(-1.0, -2.0), row(0.0, 1.0))),),
    )  # fmt: skip
    yield Operator(
        "gaussian_nll", "loss", lambda x, y, v: functional.gaussian_nll_loss(x, y, v.abs()),
        (floats(3, 4), floats(3, 4, seed=1), floats(3, 4, seed=2)),
        (Values("no variance", (row(1.0, 2.0), row(1.0, 3.0), row(0.0, 0.0))),),
    )  # fmt: skip
    yield Operator("poisson_nll", "loss", functional.poisson_nll_loss, (signed(3, 4), floats(3, 4)), pairs[:1])


def _products() -> Iterator[Operator]:
    near = floats(3, 4)
    points = (
        Values("near points", (1000 + near[:2] / 100, 1000 + near / 100)),
        Values("the same points", (near, near)),
        Values("more", (signed(20, 4, seed=5), signed(15, 4, seed=6))),
    )
    for power in (2.0, 1.0, INF):
        function = functools.partial(torch.cdist, p=power)
        yield Operator(f"cdist {power:g}", "of matrices", function, (floats(2, 4), floats(3, 4, seed=1)), points)
    yield Operator("pairwise_distance", "of matrices", functional.pairwise_distance, (near, near + 1), points[1:2])
    regular = torch.eye(3) * 3 + floats(2, 3, 3)
    other = (Values("five", (torch.eye(3) * 4 + signed(5, 3, 3, seed=2), signed(5, 3, 2))),)
    yield Operator("solve", "of matrices", torch.linalg.solve, (regular, floats(2, 3, 2)), other)
    yield Operator("inverse", "of matrices", torch.linalg.inv, (regular,), (Values("five", (other[0].inputs[0],)),))
    yield Operator("det", "of matrices", torch.linalg.det, (regular,), (Values("five", (other[0].inputs[0],)),))
    yield Operator("matmul", "of matrices", torch.matmul, (floats(2, 3, 4), floats(2, 4, 5)), ())
    yield Operator("einsum", "of matrices", lambda x, y: torch.einsum("bij,bjk->bki", x, y),
                   (floats(2, 3, 4), floats(2, 4, 5)), ())  # fmt: skip
    yield Operator("cross", "of matrices", torch.linalg.cross, (floats(4, 3), floats(4, 3, seed=1)), ())
    yield Operator("kron", "of matrices", torch.kron, (floats(2, 3), floats(3, 2)), ())
    yield Operator("diagonal", "of matrices", lambda x: x.diagonal(1, 1, 2), (floats(2, 4, 4),), ())
    yield Operator("trace", "of matrices", torch.trace, (floats(4, 4),), ())


def _indexing() -> Iterator[Operator]:
    table, ids = floats(6, 4), integers(0, 6, 3)
    ends = (Values("both ends", (table, torch.tensor([0, 5, -1, -6]))),)
    yield Operator("index", "of indices", lambda x, i: x[i], (table, ids), ends)
    yield Operator("index_select", "of indices", lambda x, i: x.index_select(0, i), (table, ids), ())
    yield Operator("take_along_dim", "of indices", lambda x, i: x.take_along_dim(i[:, None], 0), (table, ids), ())
    yield Operator("take", "of indices", torch.take, (table, ids),
                   (Values("both ends", (table, torch.tensor([0, 23, -1]))),))  # fmt: skip
    yield Operator("gather", "of indices", lambda x, i: x.gather(1, i),
                   (floats(3, 4), integers(0, 4, 3, 2)), ())  # fmt: skip
    doubled = (Values("the same place twice", (floats(3, 4), torch.zeros(3, 2, dtype=torch.int64), signed(3, 2))),)
    places = (floats(3, 4), integers(0, 4, 3, 2), floats(3, 2, seed=1))
    yield Operator("scatter_add", "of indices", lambda x, i, s: x.scatter_add(1, i, s), places, doubled)
    for how in ("sum", "prod", "mean", "amax", "amin"):
        yield Operator(
            f"scatter_reduce {how}", "of indices",
            lambda x, i, s, how=how: x.scatter_reduce(1, i, s, how), places, doubled,
        )  # fmt: skip
    yield Operator("scatter_reduce mean without self", "of indices",
                   lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False), places, doubled)  # fmt: skip
    added = (floats(6, 4), ids, floats(3, 4, seed=2))
    yield Operator("index_add", "of indices", lambda x, i, s: x.index_add(0, i, s), added,
                   (Values("the same row twice", (table, torch.tensor([1, 1, 1]), signed(3, 4))),))  # fmt: skip
    yield Operator("index_put accumulate", "of indices", lambda x, i, s: x.index_put((i,), s, accumulate=True), added,
                   (Values("the same row twice", (table, torch.tensor([1, -1, 1]), signed(3, 4))),))  # fmt: skip
    mask = floats(3, 4) > 0.9
    empty = (Values("none", (floats(3, 4), torch.zeros(3, 4, dtype=torch.bool))),)
    yield Operator("masked_fill -inf, softmax", "of masks",
                   lambda x, m: x.masked_fill(~m, -INF).softmax(-1).nan_to_num(),
                   (floats(3, 4), mask), empty)  # fmt: skip
    yield Operator("masked_fill", "of masks", lambda x, m: x.masked_fill(m, 0.0), (floats(3, 4), mask), empty)
    yield Operator("masked_scatter", "of masks", lambda x, m: x.masked_scatter(m, x * 2), (floats(3, 4), mask), empty)
    yield Operator("masked mean", "of masks", lambda x, m: (x * m).sum(-1) / m.sum(-1), (floats(3, 4), mask), empty)
    yield Operator("cumsum of a mask", "of masks", lambda x, m: x + m.cumsum(-1), (floats(3, 4), mask), empty)
    yield Operator("argmax of a mask", "of masks", lambda x, m: x + m.int().argmax(-1)[:, None], (floats(3, 4), mask),
                   empty)  # fmt: skip
    bags = (Values("empty bags", (table, torch.tensor([0, 5, 1]), torch.tensor([0, 0, 3]))),)
    for how in ("sum", "mean", "max"):
        yield Operator(
            f"embedding_bag {how}", "of indices", lambda w, i, o, how=how: functional.embedding_bag(i, w, o, mode=how),
            (table, ids, torch.tensor([0, 2])), bags,
        )  # fmt: skip
    yield Operator("bincount", "of indices", lambda i: torch.bincount(i, minlength=6), (ids,), ())
    yield Operator("repeat_interleave", "of indices", lambda x: x.repeat_interleave(2, 0), (floats(3, 4),), ())


def _attention() -> Iterator[Operator]:
    def make(rows: int, seed: int, queries: int = 4, keys: int = 6) -> Inputs:
        return (
            signed(rows, 2, queries, 8, seed=seed),
            signed(rows, 2, keys, 8, seed=seed + 1),
            signed(rows, 2, keys, 8, seed=seed + 2),
        )

    seen = torch.ones(2, 2, 4, 6, dtype=torch.bool)
    seen[..., 4:] = False
    blind, some = torch.ones(5, 2, 4, 6, dtype=torch.bool), torch.ones(3, 2, 4, 6, dtype=torch.bool).tril(1)
    blind[:, :, 1] = False
    attend = functional.scaled_dot_product_attention

    def float_mask(mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask.shape).masked_fill(~mask, -INF)

    hard = (Values("a query sees nothing", (*make(5, 7), blind)), Values("causal", (*make(3, 9), some)))
    yield Operator("attention, bool mask", "attention", attend, (*make(2, 1), seen), hard)
    yield Operator(
        "attention, float mask", "attention", attend, (*make(2, 1), float_mask(seen)),
        tuple(Values(v.name, (*v.inputs[:3], float_mask(v.inputs[3]))) for v in hard),
    )  # fmt: skip
    yield Operator(
        "attention, spelt out", "attention",
        lambda q, k, v, m: (q @ k.mT / 8**0.5).masked_fill(~m, -1e9).softmax(-1) @ v, (*make(2, 1), seen), hard,
    )  # fmt: skip
    yield Operator(
        "attention, causal", "attention", lambda q, k, v: attend(q, k, v, is_causal=True), make(2, 1),
        (Values("more keys", make(3, 5, 3, 9)), Values("large", tuple(1e3 * x for x in make(2, 5)))),
    )  # fmt: skip
    yield Operator(
        "attention, three axes", "attention", lambda q, k, v, m: attend(q[:, 0], k[:, 0], v[:, 0], m[:, 0]),
        (*make(2, 1), seen), hard,
    )  # fmt: skip
    yield Operator(
        "attention, grouped heads", "attention",
        lambda q, k, v, m: attend(torch.cat([q, q], 1), k, v, m[:, :1], enable_gqa=True), (*make(2, 1), seen), hard,
    )  # fmt: skip


def _layers() -> Iterator[Operator]:
    picture = floats(2, 3, 8, 8)
    hard = (
        Values("signs", (signed(3, 3, 8, 8, seed=3),)),
        Values("minus infinity", (torch.full((1, 3, 8, 8), -INF),)),
        Values("ties", (torch.zeros(1, 3, 8, 8),)),
    )
    kernel = signed(4, 3, 3, 3)
    made: dict[str, Callable[..., Any]] = {
        "max_pool2d": lambda x: functional.max_pool2d(x, 2),
        "max_pool2d padded": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "max_pool2d with indices": lambda x: functional.max_pool2d(x, 2, return_indices=True),
        "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 2, 1),
        "avg_pool2d without padding": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 1),
        "lp_pool2d": lambda x: functional.lp_pool2d(x.abs(), 2, 2),
        "conv2d": lambda x: functional.conv2d(x, kernel, padding=1),
        "conv_transpose2d": lambda x: functional.conv_transpose2d(x, kernel.transpose(0, 1), stride=2, padding=1),
        "interpolate nearest": lambda x: functional.interpolate(x, scale_factor=2),
        "interpolate bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        "interpolate bicubic": lambda x: functional.interpolate(x, size=(5, 11), mode="bicubic"),
        "interpolate bilinear aligned": lambda x: functional.interpolate(
            x, size=(5, 11), mode="bilinear", align_corners=True
        ),
        "pad reflect": lambda x: functional.pad(x, (1, 2, 1, 2), mode="reflect"),
        "pad replicate": lambda x: functional.pad(x, (1, 2, 1, 2), mode="replicate"),
        "pad circular": lambda x: functional.pad(x, (1, 2, 1, 2), mode="circular"),
        "pixel_shuffle": lambda x: functional.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
        "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
        "group_norm": lambda x: functional.group_norm(x, 3),
        "instance_norm": lambda x: functional.instance_norm(x),
        "local_response_norm": lambda x: functional.local_response_norm(x, 2),
        "im2col": lambda x: functional.unfold(x, 3),
        "fold": lambda x: functional.fold(functional.unfold(x, 3), (8, 8), 3),
    }
    for name, function in made.items():
        yield Operator(name, "of pictures", function, (picture,), hard)
    grid = functional.affine_grid(torch.eye(2, 3)[None].repeat(2, 1, 1), [2, 3, 5, 5], align_corners=False)
    outside = (Values("outside", (picture, grid * 3)),)
    for mode in ("zeros", "border", "reflection"):
        yield Operator(
            f"grid_sample {mode}", "of pictures",
            functools.partial(functional.grid_sample, padding_mode=mode, align_corners=False), (picture, grid), outside,
        )  # fmt: skip
    sound = Values("zeros", (torch.zeros(2, 64),))
    yield Operator("stft", "of sound", lambda x: torch.stft(x, 16, window=torch.hann_window(16), return_complex=True)
                   .abs(), (signed(2, 64),), (sound,))  # fmt: skip
    yield Operator("rfft", "of sound", lambda x: torch.fft.rfft(x).abs(), (signed(2, 64),), (sound,))


def _encoders() -> Iterator[Operator]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    single = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().requires_grad_(False)
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)
    whole, padded, left, alone = (torch.zeros(rows, 6, dtype=torch.bool) for rows in (2, 3, 3, 2))
    padded[0, 4:], left[0, :2], alone[0] = True, True, True
    hard = (
        Values("padded", (signed(3, 6, 16, seed=1), padded)),
        Values("padded on the left", (signed(3, 6, 16, seed=1), left)),
        Values("a row of padding", (signed(2, 6, 16, seed=1), alone)),
    )
    calls: dict[str, Callable[..., Any]] = {
        "TransformerEncoder": lambda x, m: encoder(x, src_key_padding_mask=m),
        "TransformerEncoderLayer": lambda x, m: single(x, src_key_padding_mask=m),
        "MultiheadAttention": lambda x, m: attention(x, x, x, key_padding_mask=m, need_weights=False)[0],
        "MultiheadAttention with weights": lambda x, m: attention(x, x, x, key_padding_mask=m)[1],
    }
    for name, function in calls.items():
        yield Operator(name, "attention", function, (signed(2, 6, 16), whole), hard)


def operators() -> Sequence[Operator]:
    """Return all operators, each with a different name."""
    made = (_unary, _binary, _reductions, _losses, _products, _indexing, _attention, _layers, _encoders)
    return [one for group in made for one in group()]
