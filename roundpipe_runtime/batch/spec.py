"""Rules that state, by key path, how inputs are split into microbatches and how outputs are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from yobx_flatten import leaves, string_type

from ..errors import ConfigError, RoundPipeError, SplitError


class RoundPipePackedData(list[Any]):
    """The output of a pipeline called with ``merge_output=False``: a list with the output of each microbatch.

    If the list is passed to a pipeline, entry i becomes the input of microbatch i. Entries are not joined or split. The
    pipeline does not wait until the entries are computed.

    Args:
        values: list entries, one per microbatch.
        rows: number of rows of each microbatch; ``None`` for an unknown number.
        wait: function that returns when all entries can be read on the host. :meth:`synchronize` calls it once.

    >>> import torch
    >>> from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
    >>> model = RoundPipe(torch.nn.Linear(3, 2), devices="virtual:2")
    >>> config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    >>> outputs = model(torch.ones(4, 3), roundpipe_run_config=config)
    >>> [entry.shape for entry in outputs.synchronize()]
    [torch.Size([2, 2]), torch.Size([2, 2])]
    >>> model.close()
    """

    def __init__(
        self, values: Iterable[Any], *, rows: Sequence[int | None] = (), wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__(values)
        self.rows = tuple(rows) or (None,) * len(self)
        self._wait = wait

    def synchronize(self) -> RoundPipePackedData:
        """Wait until all entries of the list can be read, and return the list itself."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class TensorChunkSpec:
    """A rule that splits a tensor into microbatches along an axis, or concatenates outputs along this axis.

    Attributes:
        dim: axis; a negative number counts from the last axis.

    >>> import torch
    >>> from roundpipe_runtime.batch import split
    >>> parts = split((torch.zeros(3, 4),), {}, None, 2, split_input={"args[0]": TensorChunkSpec(1)})
    >>> [part.args[0].shape for part in parts]
    [torch.Size([3, 2]), torch.Size([3, 2])]
    """

    dim: int

    @property
    def split_dim(self) -> int:
        """The attribute ``dim``, under the name that ``TensorChunkSpec`` of ``torch.distributed.pipelining`` uses."""
        return self.dim


class Replicate:
    """A rule that passes an input unsplit to every microbatch, or requires an output to be equal in all microbatches.

    Pass the class ``Replicate`` itself, as in ``(TensorChunkSpec(0), Replicate)``, or an instance.

    >>> import torch
    >>> from roundpipe_runtime.batch import split
    >>> parts = split((torch.zeros(4, 3), torch.ones(4)), {}, None, 2, split_input={"args[1]": Replicate})
    >>> [tuple(argument.shape for argument in part.args) for part in parts]
    [(torch.Size([2, 3]), torch.Size([4])), (torch.Size([2, 3]), torch.Size([4]))]
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How the values at a key path, and all values nested in them, are split into microbatches or joined."""

    dim: int | None  # axis to split along; `None` passes the leaf on whole
    # function of two arguments that reduces the outputs, starting with `init`; then `dim` is not used
    reduce: Callable[[Any, Any], Any] | None = None
    init: Any = None  # initial value of `reduce`


Rules: TypeAlias = dict[str, Rule]


def sizes(batch: int, num_microbatch: int) -> list[int]:
    """Return the number of rows of each microbatch: nearly equal, larger numbers first, as in ``torch.tensor_split``.

    Args:
        batch: number of rows.
        num_microbatch: requested number of microbatches.

    Returns:
        The number of rows of each microbatch. With fewer rows than microbatches, each row is a microbatch, because an
        empty microbatch has no mean loss. A batch without rows becomes one empty microbatch.

    Raises:
        ConfigError: ``num_microbatch`` is not an integer of at least 1.

    >>> sizes(10, 4), sizes(2, 4), sizes(0, 4)
    ([3, 3, 2, 2], [1, 1], [0])
    """
    if type(num_microbatch) is not int or num_microbatch < 1:
        raise ConfigError(f"num_microbatch must be a whole number of at least 1, found {num_microbatch!r}.")
    count = max(1, min(batch, num_microbatch))
    rows, larger = divmod(batch, count)
    return [rows + (index < larger) for index in range(count)]


def read_rules(spec: Any, name: str, error: type[RoundPipeError] = SplitError) -> Rules:
    # spec: marks in the structure of the tree that is split; a mark also applies to all leaves below it, and `None`
    # gives no rule. If `name` is empty: a mapping from key paths to marks.
    if spec is None:
        return {}
    if name:
        marks: Iterable[tuple[str, Any]] = [(leaf.path, leaf.value) for leaf in leaves(spec, name=name)]
    else:
        marks = spec.items()
    return {path: _rule(mark, path, error) for path, mark in marks if mark is not None}


def rule_for(path: str, rules: Mapping[str, Rule]) -> Rule | None:
    above = [written for written in rules if is_below(path, written)]
    return rules[max(above, key=len)] if above else None


def is_below(path: str, above: str) -> bool:
    return path == above or (path.startswith(above) and path[len(above)] in ".[")


def format_value(value: Any) -> str:
    """Describe an argument in an error message: tensors by type and shape, without their values.

    >>> import torch
    >>> format_value(5), format_value([torch.zeros(2, 3)])
    ('5', '#1[T1s2x3]')
    """
    return repr(value) if isinstance(value, int | float | str | type | None) else string_type(value, with_shape=True)


def _rule(mark: Any, path: str, error: type[RoundPipeError]) -> Rule:
    kind = mark if isinstance(mark, type) else type(mark)
    # the classes of torch.distributed.pipelining are recognized by name, because importing them takes half a second
    if kind is Replicate or _is_torchs(kind, "_Replicate"):
        return Rule(None)
    if isinstance(mark, TensorChunkSpec) or _is_torchs(kind, "TensorChunkSpec"):
        return Rule(mark.split_dim)
    if _is_torchs(kind, "_CustomReducer"):
        return Rule(None, mark.reduce_fn, mark.init_value)
    raise error(
        f"{path}: expected TensorChunkSpec(dim), Replicate or None, found {format_value(mark)}. A rule looks like "
        "this:\n"
        f"    {{{path!r}: TensorChunkSpec(0)}}"
    )


def _is_torchs(kind: type, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith("torch.distributed.pipelining.") for c in kind.__mro__)
