"""Test cases, which run with the eager module once for all runtimes that they are replayed with."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from ...core.effects import Snapshot, shared_generators, undisturbed
from ...diagnose.export_errors import explain_error
from ...errors import FlattenError, InvalidArgumentError, describe_class
from ...errors.failures import first_line, raised_as
from ...huggingface.cache_names import forward_of, named_for
from ...huggingface.decoders import Continued
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ..model_facts import weight_bytes
from .left import Left, returning_left, with_present, written_parameters

REFUSALS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)
"""Errors by which a module refuses inputs of other sizes."""

Next = Callable[[Mapping[str, Any], Any, int], dict[str, Any] | None]

KEPT_BYTES = 1 << 26
"""Inputs and outputs of a case are kept for the next runtime up to this many bytes; a larger case is computed again."""


# The number of threads before the first active block, once for each active block.
_THREADS: list[int] = []
_LOCK = threading.Lock()


@contextlib.contextmanager
def in_one_thread(module: torch.nn.Module) -> Iterator[None]:
    """In a ``with`` block, run small models with one thread, since more threads mostly wait in short calls."""
    if weight_bytes(module) >= SAMPLED_FROM:
        yield
        return
    with _LOCK:
        _THREADS.append(_THREADS[0] if _THREADS else torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:
            torch.set_num_threads(_THREADS.pop())


class Step(NamedTuple):
    """One call of the module."""

    given: Mapping[str, Any]  # keyword arguments
    outputs: Any
    goes_on: bool  # whether the call got the cache that the previous call returned


def eager_steps(
    module: torch.nn.Module,
    case: Case,
    written: Collection[str] = (),
    left: Left | None = None,
    *,
    twice: bool = False,
    lost: dict[str, str] | None = None,
) -> list[Step]:
    """Run a test case eagerly, and return copies of the inputs and outputs of each call.

    The module is called with the objects of the caller, which are restored afterwards. The module keeps its state from
    call to call; afterwards, the state is restored.

    With ``twice``, a single call that assigns attributes of the module is repeated, because a program always has the
    values of the trace, and only a second call shows the difference.
    """
    # left: changed arguments that are returned in addition to the outputs
    # lost: gets the argument changes that are not returned, and random generators that a program lacks
    steps: list[Step] = []
    lost = {} if lost is None else lost
    following = _following(module)

    def call(kwargs: Mapping[str, Any], number: int) -> tuple[Any, Any]:
        """Return the outputs of a call, and a copy, since the next call may change the outputs."""
        with undisturbed(seed=number, args=case.args), _naming(case, module, number), torch.no_grad():
            generators = Snapshot.of(**shared_generators())
            outputs = module(*case.args, **kwargs)
            lost.update(dict.fromkeys(generators.changes(), "drawn"))
            return outputs, clone(outputs)

    first = named_for(forward_of(module), case.kwargs)
    before = undisturbed(module=module, parameters=written_parameters(module, written))
    with in_one_thread(module), before as snapshot, returning_left(module, left) as watch:
        kwargs: Mapping[str, Any] | None = first
        with undisturbed(kwargs=first):
            while kwargs is not None:
                given, index = clone(kwargs), len(steps)
                outputs, kept = call(kwargs, index)
                steps.append(Step(given, kept, goes_on=index > 0))
                kwargs = following(given, outputs, index) if index + 1 < case.steps else None
        if twice and len(steps) == 1 and _exchanges(module, snapshot):
            with undisturbed(kwargs=first):
                steps.append(Step(steps[0].given, call(first, 1)[1], goes_on=False))
        lost |= watch.lost
    return steps


def _exchanges(module: torch.nn.Module, before: Snapshot) -> bool:
    """Return whether a module assigned new values to attributes, which a program cannot do."""
    hooks = ("module._forward_hooks", "module._forward_pre_hooks")  # `returning_left` registers hooks
    state = {id(tensor) for tensor in (*module.buffers(), *module.parameters())}
    changes = before.changes()
    return any(
        effect != "written" and id(changes.objects[path][1]) not in state and not path.startswith(hooks)
        for path, effect in changes.items()
    )


def _naming(case: Case, module: torch.nn.Module, step: int) -> contextlib.AbstractContextManager[None]:
    def stopped(error: Exception) -> InvalidArgumentError:
        explanation = explain_error(error, module)
        known = f"\n{explanation}" if explanation.known and not isinstance(error, FlattenError) else ""
        return InvalidArgumentError(
            f"case {case.name!r}, step {step}: {type(module).__qualname__} itself fails, before anything is compared "
            f"({type(error).__name__}: {first_line(error)}).{known}"
        )

    return raised_as(stopped)


Texts: TypeAlias = tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]
"""Arguments of a call on a text, the text, losses of the model, and its logits (``None`` if too large for memory)."""


class EagerRuns:
    """Runs a module eagerly on test cases, and keeps small outputs, since several files are compared with them.

    Outputs are stored under ``id(case)``. For a module with an active adapter, pass copies of the cases.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.texts: list[Texts] = []  # the module's outputs for the text that files are measured on
        self.lost: dict[str, str] = {}  # argument changes that calls do not return, by path
        # each value contains its case, so that the id in the key stays valid
        self._kept: dict[tuple[int, frozenset[str], bool, bool], tuple[Case, list[Step]]] = {}
        self._bytes = 0

    def steps(
        self, case: Case, written: Collection[str] = (), left: Left | None = None, *, twice: bool = False
    ) -> list[Step]:
        """Return the calls of a case, see :func:`eager_steps`."""
        key = id(case), frozenset(written), left is None, twice
        if key in self._kept:
            return _copied(self._kept[key][1])
        steps = eager_steps(self.module, case, written, left, twice=twice, lost=self.lost)
        size = sum(
            leaf.nbytes for leaf in pytree.tree_leaves([tuple(one) for one in steps]) if isinstance(leaf, torch.Tensor)
        )
        if self._bytes + size <= KEPT_BYTES:
            self._bytes += size
            self._kept[key] = case, _copied(steps)
        return steps

    def first(self, kwargs: Mapping[str, Any]) -> Step | None:
        """Return the first call of a stored case with exactly these inputs; ``None`` without such a case."""
        leaves = pytree.tree_leaves(dict(kwargs))
        for (_, _, is_plain, _), (case, steps) in self._kept.items():
            given = pytree.tree_leaves((case.args, dict(case.kwargs)))
            if is_plain and len(given) == len(leaves) and all(map(operator.is_, given, leaves)):
                return _copied(steps[:1])[0]
        return None


def _copied(steps: list[Step]) -> list[Step]:
    """Return copies, since a replayed program may write to its inputs."""
    return [Step(clone(step.given), clone(step.outputs), step.goes_on) for step in steps]


def _following(module: torch.nn.Module) -> Next:
    """Return a function that makes the inputs of the next call from the outputs of the last call."""
    if isinstance(module, Continued):
        return module.next_inputs

    def following(kwargs: Mapping[str, Any], outputs: Any, seed: int) -> dict[str, Any] | None:
        if "transformers" in sys.modules:
            from ...huggingface.cases import next_inputs

            found = next_inputs(kwargs, outputs, seed)
            if found is not None:
                return found
        return with_present(kwargs, outputs)

    return following


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs at which an export is compared with the model.

    Attributes:
        name: a short description of the case, for the report.
        args: positional arguments; none by default.
        kwargs: keyword arguments; none by default.
        steps: number of calls, 1 by default; each further call gets the cache that the previous call returned.

    >>> import torch
    >>> from yobx_flatten import export_program
    >>> case = Case("one row", (torch.ones(1, 3),))
    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), cases=[case])
    >>> [result.case for result in exported.report.cases]
    ['the example', 'one row']
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 1


def clone(tree: PyTree) -> PyTree:
    """Copy every tensor of nested inputs, since a call writes to a static cache in place."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def check_cases(cases: Iterable[Any] | Case) -> list[Case]:
    """Return the cases as a list, after a check that each is a :class:`Case`; a single case is also accepted."""
    found = [cases] if isinstance(cases, Case) else list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise InvalidArgumentError(
                f"cases[{number}]: expected a Case, found {describe_class(case)}.\n"
                '    cases=[Case("five rows", args, kwargs)]'
            )
    return found


Proof = Literal["auto", "full", "standard", "sample", "none"]
"""``"full"`` checks program and file on all cases; ``"standard"`` only the file, on less text; ``"sample"`` the example
and the largest case; ``"none"`` nothing."""

STANDARD_FROM, SAMPLED_FROM = 10**8, 10**9
"""Bytes of weights: from the first number, ``proof="auto"`` means ``"standard"``; from the second, ``"sample"``."""

UNPROVEN = 'UNPROVEN: nothing was checked, as requested by proof="none". Compare it with the model before you use it.'


def choose_proof(proof: Proof, weight_bytes: int) -> Literal["full", "standard", "sample", "none"]:
    """Return how thoroughly an export is checked: ``"full"``, ``"standard"``, ``"sample"`` or ``"none"``.

    >>> choose_proof("auto", 32)
    'full'
    """
    # with "auto", the checks take no longer than the export: one call of a model of 1 GB takes seconds
    if proof not in get_args(Proof):
        raise InvalidArgumentError(f"proof must be one of {', '.join(map(repr, get_args(Proof)))}, found {proof!r}.")
    if proof == "auto":
        return "full" if weight_bytes < STANDARD_FROM else "standard" if weight_bytes < SAMPLED_FROM else "sample"
    return proof


def sampled(cases: Sequence[Case]) -> list[Case]:
    """Return a list with only the case that has the largest inputs."""

    def size(case: Case) -> int:
        leaves: list[Any] = pytree.tree_leaves((case.args, dict(case.kwargs)))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    return [max(cases, key=size)] if cases else []
