"""Run test cases once with the eager module, for all runtimes, and find changes that a call makes to its arguments."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...core.effects import Snapshot, shared_generators, undisturbed
from ...core.private_names.of_torch import pytree
from ...diagnose.export_errors import explain_error
from ...errors import FlattenError, InvalidArgumentError, ReplayError, describe_class
from ...errors.failures import first_line, raised_as
from ...huggingface.cache_names import CACHE, PRESENT, forward_of, is_cache, named_for, word_in_files
from ...huggingface.decoders import Continued
from ...registry.recipe.aliases import PyTree
from ...runners.ports import present_of
from ...trees.walk import key_name, leaf_names, node_of
from ..model_facts import weight_bytes

REFUSALS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)
"""Errors by which a module refuses inputs of other sizes."""

KEPT_BYTES = 1 << 26
"""Inputs and outputs of a case are kept for the next runtime up to this many bytes; a larger case is computed again."""


# The number of threads before the first active block, once for each active block.
_THREADS: list[int] = []
_LOCK = threading.Lock()


@contextlib.contextmanager
def in_one_thread(module: torch.nn.Module) -> Iterator[None]:
    """In a ``with`` block, use one CPU thread for a small model, whose short calls are not faster with more threads."""
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
    """Run the calls of a test case with the eager module, and restore the arguments and the module's state."""
    # left: changed arguments that are returned in addition to the outputs
    # twice: whether a single call that assigns attributes of the module is repeated, because a program always has the
    # values of the trace, and only a second call shows the difference
    # lost: gets the argument changes that are not returned, and random generators that a program lacks
    steps: list[Step] = []
    lost = {} if lost is None else lost

    def stopped(number: int, error: Exception) -> InvalidArgumentError:
        explanation = explain_error(error, module)
        known = f"\n{explanation}" if explanation.known and not isinstance(error, FlattenError) else ""
        return InvalidArgumentError(
            f"case {case.name!r}, step {number}: {type(module).__qualname__} itself fails, before anything is compared "
            f"({type(error).__name__}: {first_line(error)}).{known}"
        )

    def call(kwargs: Mapping[str, Any], number: int) -> tuple[Any, Any]:
        named = raised_as(functools.partial(stopped, number))
        with undisturbed(seed=number, args=case.args), named, torch.no_grad():
            generators = Snapshot.of(**shared_generators())
            outputs = module(*case.args, **kwargs)
            lost.update(dict.fromkeys(generators.changes(), "drawn"))
            return outputs, clone(outputs)  # the next call may change the outputs

    first = named_for(forward_of(module), case.kwargs)
    before = undisturbed(module=module, parameters=written_parameters(module, written))
    with in_one_thread(module), before as snapshot, returning_left(module, left) as watch:
        kwargs: Mapping[str, Any] | None = first
        with undisturbed(kwargs=first):
            while kwargs is not None:
                given, index = clone(kwargs), len(steps)
                outputs, kept = call(kwargs, index)
                steps.append(Step(given, kept, goes_on=index > 0))
                kwargs = _next_inputs(module, given, outputs, index) if index + 1 < case.steps else None
        if twice and len(steps) == 1:
            changes = snapshot.changes()
            hooks = ("module._forward_hooks", "module._forward_pre_hooks")  # `returning_left` registers hooks
            state = {id(tensor) for tensor in (*module.buffers(), *module.parameters())}
            assigned = [path for path, effect in changes.items() if effect != "written" and not path.startswith(hooks)]
            if any(id(changes.objects[path][1]) not in state for path in assigned):
                with undisturbed(kwargs=first):
                    steps.append(Step(steps[0].given, call(first, 1)[1], goes_on=False))
        lost |= watch.lost
    return steps


Texts: TypeAlias = tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]
"""Arguments of a call on a text, the text, losses of the model, and its logits (``None`` if too large for memory)."""


class EagerRuns:
    """Runs test cases with the eager module, and caches small outputs for comparisons with several files."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.texts: list[Texts] = []  # the module's outputs for the text that files are measured on
        self.lost: dict[str, str] = {}  # argument changes that calls do not return, by path
        # by the id of a case, which each value keeps alive; to run a case with another LoRA adapter, copy the case
        self._kept: dict[tuple[int, frozenset[str], bool, bool], tuple[Case, list[Step]]] = {}
        self._bytes = 0

    def steps(
        self, case: Case, written: Collection[str] = (), left: Left | None = None, *, twice: bool = False
    ) -> list[Step]:
        key = id(case), frozenset(written), left is None, twice
        if key in self._kept:
            return _copied(self._kept[key][1])
        steps = eager_steps(self.module, case, written, left, twice=twice, lost=self.lost)
        leaves = pytree.tree_leaves([tuple(one) for one in steps])
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        if self._bytes + size <= KEPT_BYTES:
            self._bytes += size
            self._kept[key] = case, _copied(steps)
        return steps

    def first(self, kwargs: Mapping[str, Any]) -> Step | None:
        """Return the cached first call of the test case with exactly these inputs; ``None`` if it is not cached."""
        leaves = pytree.tree_leaves(dict(kwargs))
        for (_, _, is_plain, _), (case, steps) in self._kept.items():
            given = pytree.tree_leaves((case.args, dict(case.kwargs)))
            if is_plain and len(given) == len(leaves) and all(map(operator.is_, given, leaves)):
                return _copied(steps[:1])[0]
        return None


def _copied(steps: list[Step]) -> list[Step]:
    return [Step(clone(step.given), clone(step.outputs), step.goes_on) for step in steps]


def _next_inputs(module: torch.nn.Module, kwargs: Mapping[str, Any], outputs: Any, seed: int) -> dict[str, Any] | None:
    if isinstance(module, Continued):
        return module.next_inputs(kwargs, outputs, seed)
    found = None
    if "transformers" in sys.modules:
        from ...huggingface.cases import next_inputs

        found = next_inputs(kwargs, outputs, seed)
    return with_present(kwargs, outputs) if found is None else found


@dataclasses.dataclass(frozen=True)
class Case:
    """A test case: inputs for which the outputs of an export are compared with the outputs of the model.

    Attributes:
        name: a short description of the test case, for the report.
        args: positional arguments; none by default.
        kwargs: keyword arguments; none by default.
        steps: number of calls, 1 by default; later calls get the cache that the previous call returned.

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
    """Copy every tensor in nested inputs, because a call may write to its inputs."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def check_cases(cases: Iterable[Any] | Case) -> list[Case]:
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

UNPROVEN = 'UNPROVEN: nothing was checked, as requested by proof="none". Compare the file with the model before use.'


def choose_proof(proof: Proof, weight_bytes: int) -> Literal["full", "standard", "sample", "none"]:
    # with "auto", the checks take no longer than the export: one call of a model of 1 GB takes seconds
    if proof not in get_args(Proof):
        raise InvalidArgumentError(f"proof must be one of {', '.join(map(repr, get_args(Proof)))}, found {proof!r}.")
    if proof == "auto":
        return "full" if weight_bytes < STANDARD_FROM else "standard" if weight_bytes < SAMPLED_FROM else "sample"
    return proof


def sampled(cases: Sequence[Case]) -> list[Case]:
    # the test case with the largest inputs

    def size(case: Case) -> int:
        leaves: list[Any] = pytree.tree_leaves((case.args, dict(case.kwargs)))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    return sorted(cases, key=size, reverse=True)[:1]


# Add outputs for arguments that a call changes and does not return. Hooks around `forward` compare the leaves of each
# argument before and after a call, in a trace and in eager calls.
#
#     forward(x, cache, log)          writes to cache, appends to log, returns y
#     program                         {"y": ..., "present": {"cache": ..., "log.1": ...}}
#     file                            y, present.cache, present.log.1
#     forward(input_ids, a DynamicCache)       extends the cache, returns y
#     file                            y, present.0.key, present.0.value, ...


@dataclasses.dataclass(frozen=True)
class Left:
    """The changes that ``forward`` makes to its arguments, which a program returns as additional outputs."""

    caches: tuple[str, ...]  # names of arguments that are caches; each is returned under its name
    leaves: tuple[str, ...]  # names of leaves of other arguments that are new or changed
    written: tuple[str, ...]  # names of arguments whose only change is that tensors were written in place
    specs: Mapping[str, pytree.TreeSpec]  # structure of each changed argument after the call
    own: pytree.TreeSpec  # structure of the module's own outputs

    def remarks(self) -> list[str]:
        others = [name for name in self.specs if name not in self.caches and name not in self.written]
        kinds = (("writes to", self.written), ("extends", self.caches), ("changes", others))
        does = [f"{verb} {', '.join(names)}" for verb, names in kinds if names]
        added = [f"{PRESENT}.{_after_present(name)}" for name in self.leaves]
        added += [f"{PRESENT}.*"] if self.caches else []
        return [
            f"forward {' and '.join(does)} but does not return the result: the program and its files also return "
            f"{', '.join(added) or 'nothing of it'}, for the next call. If the module is not called in a loop, "
            "loop=False leaves these outputs out."
        ]

    def given_back(self, found: PyTree, given: Mapping[str, Any]) -> PyTree:
        """Return the module's outputs; copy argument changes that the program returns into the caller's arguments."""
        # found: outputs of the program; given: arguments of the call, by name
        own = {name: value for name, value in found.items() if name not in (PRESENT, *self.caches)}
        new = found.get(PRESENT, {})
        for name, spec in self.specs.items():
            value = given[name]
            if name in self.caches:
                _adopted(value, found[name])
            elif name not in self.written:  # the program has written in place to the other arguments
                held = dict(zip(leaf_names({name: value}), pytree.tree_leaves(value), strict=True))
                names = leaf_names({name: pytree.tree_unflatten(list(range(spec.num_leaves)), spec)})
                leaves = [new[_after_present(leaf)] if leaf in self.leaves else held[leaf] for leaf in names]
                _adopted(value, pytree.tree_unflatten(leaves, spec))
        return pytree.tree_unflatten(pytree.tree_leaves(own), self.own)


def note_on_lost(lost: Mapping[str, str]) -> list[str]:
    """Return notes on argument changes and random numbers of ``forward`` that exported programs do not reproduce."""
    drawn = [name for name, effect in lost.items() if effect == "drawn"]
    found = [f"forward draws from {one}: program calls repeat the trace's numbers. Draw with torch." for one in drawn]
    changes = ", ".join(f"{path} ({effect})" for path, effect in lost.items() if effect != "drawn")
    if changes:
        found.append(
            f"forward changes {changes} in its arguments and does not return the change. Files lose the change; the "
            "program repeats only writes into tensors."
        )
    return found


def with_present(kwargs: Mapping[str, Any], outputs: PyTree) -> dict[str, Any] | None:
    """Return the next call's ``kwargs``, with the arguments that a call changed; ``None`` if names or shapes differ."""
    left = outputs.get(PRESENT) if isinstance(outputs, Mapping) else None
    leaves, spec = pytree.tree_flatten(dict(kwargs))
    names = [_after_present(name) for name in leaf_names(dict(kwargs))]
    if not isinstance(left, dict) or not left or not left.keys() <= set(names):
        return None
    following = [left.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    shapes = [[getattr(leaf, "shape", None) for leaf in those] for those in (leaves, following)]
    return None if shapes[0] != shapes[1] else pytree.tree_unflatten(following, spec)


@contextlib.contextmanager
def returning_left(module: torch.nn.Module, wanted: Left | None = None, *, finds: bool = False) -> Iterator[_Watch]:
    """In a ``with`` block, make a module return its outputs and, in addition, the arguments that it changed."""
    # wanted: the changes to return
    # finds: whether a call, which is a trace, detects the changes and returns all of them
    watch = _Watch(wanted, finds)
    before = module.register_forward_pre_hook(watch.before, prepend=True, with_kwargs=True)
    with before, module.register_forward_hook(watch.after, with_kwargs=True):
        yield watch


class _Watch:
    def __init__(self, wanted: Left | None, finds: bool) -> None:
        self.left, self._finds = wanted, finds
        self.lost: dict[str, str] = {}  # changes that calls do not return, by path
        self._depth = 0

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1:
            bound = inspect.signature(module.forward).bind_partial(*args).arguments
            self._given = {**bound, **kwargs}
            self._leaves = {name: _leaves(name, value) for name, value in self._given.items()}
            # in a trace, sizes are symbols, and a comparison of symbols would add guards
            self._snapshot = None if self._finds else Snapshot.of(given=self._given)

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: PyTree) -> PyTree:
        self._depth -= 1
        if self._depth:
            return outputs
        if self._finds:
            self.left = self._found(outputs)
        elif self._snapshot is not None:
            changes = self._snapshot.changes()
            returned = set(_identities(outputs)) if changes else set()
            for path, effect in changes.items():
                name = next((name for name in self._given if path.startswith(f"given[{name!r}]")), None)
                is_known = self.left is not None and name in self.left.specs
                if name is None or is_known or id(self._given[name]) in returned:
                    continue
                changed = changes.objects[path][1]
                if not (isinstance(changed, torch.Tensor) and id(changed) in returned):
                    self.lost.setdefault(name + path.removeprefix(f"given[{name!r}]"), effect)
        return outputs if self.left is None else _with_left(outputs, self.left, self._given)

    def _found(self, outputs: PyTree) -> Left | None:
        returned = set(_identities(outputs))
        caches: list[str] = []
        leaves: list[str] = []
        written: list[str] = []
        specs = {}
        for name, value in self._given.items():
            before, after = self._leaves[name], _leaves(name, value)
            # leaves that the call wrote to, replaced or added
            changed = [n for n, leaf in after.items() if not leaf.is_made and not _is_same(before.get(n), leaf)]
            is_returned = before.keys() <= after.keys() and all(id(after[n].value) in returned for n in changed)
            if id(value) in returned or is_returned:
                continue
            specs[name] = pytree.tree_structure(value)
            if word_in_files(name, value) == CACHE and is_cache(value):
                caches.append(name)
            else:
                leaves += [leaf for leaf in after if leaf in changed or after[leaf].is_made]
                is_kept = all(after[leaf].value is before[leaf].value for leaf in after.keys() & before.keys())
                if is_kept and after.keys() == before.keys():
                    written.append(name)
        if not specs:
            return None
        return Left(tuple(caches), tuple(leaves), tuple(written), specs, pytree.tree_structure(outputs))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    value: Any
    version: int | None  # version counter of a tensor
    is_made: bool  # whether each flattening makes a new object, such as the counter of a cache


def _leaves(name: str, value: object) -> dict[str, _Leaf]:
    found = {}
    rows = zip(leaf_names({name: value}), pytree.tree_leaves(value), pytree.tree_leaves(value), strict=True)
    for path, leaf, again in rows:
        version = leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None
        found[path] = _Leaf(leaf, version, leaf is not again)
    return found


def _is_same(before: _Leaf | None, after: _Leaf) -> bool:
    if before is None:
        return False
    if before.value is after.value:
        return before.version == after.version
    # only constants are compared by value: comparing symbols of a trace would add guards
    is_constant = type(before.value) is type(after.value) and isinstance(after.value, (bool, int, float, str))
    return is_constant and bool(before.value == after.value)


def _identities(tree: PyTree) -> Iterator[int]:
    yield id(tree)
    node = node_of(tree)
    for child in () if node is None else node.children:
        yield from _identities(child)


def _after_present(leaf: str) -> str:
    present = present_of(leaf)
    return leaf if present is None else present.removeprefix(f"{PRESENT}.")


def _with_left(outputs: PyTree, left: Left, given: Mapping[str, Any]) -> dict[str, Any]:
    node = None if is_cache(outputs) or isinstance(outputs, (tuple, list)) else node_of(outputs)
    entries = {"output": outputs}  # outputs without names are one entry
    if node is not None and (isinstance(outputs, Mapping) or node.recipe is not None):
        entries = {key_name(key): child for key, child in zip(node.keys, node.children, strict=True)}
    added = {name: given[name] for name in left.caches}
    if left.leaves:
        held: dict[str, Any] = {}
        for name in left.specs:
            held |= dict(zip(leaf_names({name: given[name]}), pytree.tree_leaves(given[name]), strict=True))
        missing = [leaf for leaf in left.leaves if leaf not in held]
        if missing:
            raise ReplayError(
                f"after this call, its arguments lack {', '.join(missing)}, which forward added or changed in the "
                "trace. Pass arguments with the same structure in all calls."
            )
        added[PRESENT] = {_after_present(leaf): held[leaf] for leaf in left.leaves}
    if entries.keys() & added.keys():
        entries = {"output": outputs}
    return {**entries, **added}


def _adopted(old: Any, new: Any) -> Any:
    """Copy the contents of one object to the caller's object of the same class; return the caller's object."""
    if old is new or type(old) is not type(new) or isinstance(old, torch.Tensor):
        return new
    if isinstance(old, (list, collections.deque)):
        items = [*map(_adopted, old, new), *list(new)[len(old) :]]
        old.clear()
        old.extend(items)
        return old
    if isinstance(old, dict):
        made = {key: _adopted(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(made)
    if node_of(old) is None:
        return old if isinstance(old, dict) else new
    for name, value in getattr(new, "__dict__", {}).items():
        vars(old)[name] = _adopted(vars(old).get(name), value)
    for name in [name for cls in type(old).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(new, name)]:
        object.__setattr__(old, name, _adopted(getattr(old, name, None), getattr(new, name)))
    return old


def written_parameters(module: torch.nn.Module, written: Collection[str]) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters(remove_duplicate=False) if name in written]


def written_state(program: ExportedProgram) -> list[str]:
    """Return the names of buffers, parameters and other tensors that a program writes to, in order of its inputs."""
    signature = program.graph_signature
    kinds = (InputKind.BUFFER, InputKind.PARAMETER, InputKind.CONSTANT_TENSOR)
    states = [spec for spec in signature.input_specs if spec.kind in kinds]
    names = {spec.arg.name: spec.target for spec in states if spec.target is not None}
    found = {*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if any(given.get(flag) is True for flag in ("training", "train", "use_input_stats")):
            writes |= {"running_mean", "running_var"}  # batch_norm writes them; its schema does not declare the writes
        found |= {names.get(_root(given.get(name)), "") for name in writes}
    return [name for name in names.values() if name in found]


def _root(node: object) -> str:
    """Return the name of the graph input whose memory an fx node shares; ``""`` if the node has its own memory."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not (schema.returns and schema.returns[0].alias_info is not None):
            return ""
        node = node.args[0]
    return node.name if isinstance(node, torch.fx.Node) else ""


def draws_random_numbers(program: ExportedProgram) -> list[str]:
    switches = {"train", "training", "dropout", "dropout_p", "p"}
    drawing: dict[str, bool] = {}  # by operator: whether any call draws; a dropout in a module in `eval()` does not
    for node in program.graph.nodes:
        target = node.target
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
            continue
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        named = [a for a in target._schema.arguments if a.name in switches]
        draws = all(given.get(a.name, a.default_value) not in (False, 0) for a in named)
        drawing[str(target)] = drawing.get(str(target), False) or draws
    return [operator for operator, draws in drawing.items() if draws]
