"""Split a Hugging Face model by recording and replaying its forward, and list the tensors between its modules."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.registry.recipe.aliases import Kwargs

from ...device.composite import parts_of, stored_bytes
from ...errors import CutError, MissingEmbeddingError, StageError
from ...pipeline.live import ModelReading, changed_layers
from ..adapters import example_inputs, plain_rows, without_cache
from ..loss.own_loss import with_labels
from .caches import Entry, MadeCache, check_apart
from .call_log import BoxUse, CallLog, Candidate, EmptyCache, Tree, candidates, observe
from .capture import asked_for, install_hooks
from .check import CutReport, check_equivalence, checking, evaluating
from .cut_plan import CutPlan, CutState, begin
from .pieces import Finished, LayerCall, MissingValueError, Phase, Whole
from .stub import Key, copy_with_stubs, sync


@dataclasses.dataclass(frozen=True, repr=False)
class Cut:
    """A model that was split into modules, which a pipeline runs one after the other.

    Attributes:
        model: original model, whose parameters all modules in ``pieces`` share.
        pieces: modules of the split model. The first module takes the arguments of the model, and the last module
            returns the model's output. If the model could not be split, the only module runs the whole model.
        report: result of the split in words and numbers.
        layers: layers of the model that became separate modules, by name.
        reading: record of the model's modules and parameters at the time of the split.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> list(cut(LlamaForCausalLM(tiny), check=False).layers)
    ['model.layers.0', 'model.layers.1']
    """

    model: nn.Module
    pieces: Sequence[nn.Module]
    report: CutReport
    layers: Mapping[str, nn.Module]
    reading: ModelReading

    @classmethod
    def of(
        cls, model: nn.Module, pieces: Sequence[nn.Module], report: CutReport, layers: Mapping[str, nn.Module]
    ) -> Cut:
        """Return a split model; its modules get the model's current training mode, parameters and attributes.

        Args:
            model: original model.
            pieces: modules of the pipeline, in order.
            report: result of the split in words and numbers.
            layers: layers of the model that became separate modules, by name.
        """
        made = cls(model, pieces, report, layers, _read(model, layers))
        made.sync()
        return made

    def __repr__(self) -> str:
        return f"Cut of {self.report}"

    @property
    def program(self) -> CutPlan | None:
        """The plan of the split: which code of the model each module runs; ``None`` if the model was not split."""
        first = self.pieces[0]
        return first.program if isinstance(first, Phase) else None

    def sync(self) -> None:
        """Copy the model's current training mode, parameters and plain attributes to the modules of the pipeline."""
        for piece in self.pieces:
            piece.training = self.model.training
            if isinstance(piece, Phase):
                sync(piece.copy, self.model, piece.program.used[piece.number])

    def current(self) -> Cut:
        """Return this split if the model was not changed, otherwise a split of the changed model.

        Raises:
            StageError: layers were removed, added, replaced or moved.
        """
        reading = _read(self.model, self.layers)
        if reading.matches(self.reading):
            self.sync()
            return self
        now: dict[str, nn.Module] = {}
        for path in self.report.lists:
            found = result_or(partial(self.model.get_submodule, path), lambda error: None)  # the list may be removed
            if found is not None:
                now |= {f"{path}.{key}": layer for key, layer in found._modules.items() if layer is not None}
        if changed := changed_layers(self.layers, now):
            raise StageError(
                f"{self.report.model} was wrapped, and then {changed}. Wrap the model again:\n"
                "    pipeline = wrap_model_to_roundpipe(pipeline.cut.model, devices=pipeline.devices)"
            )
        if isinstance(first := self.pieces[0], Phase):
            # It is not known which phases read a new parameter, so all phases get it. Later phases may now compute with
            # the outputs of embeddings, so all phases compute these outputs.
            program = first.program
            names = _names_outside(self.model, self.layers)
            copies = dict(first.copy.named_modules())
            others = {  # modules whose class or forward differs from their copies
                name
                for name, module in self.model.named_modules()
                if name in copies
                and (not isinstance(copies[name], type(module)) or "forward" in {*vars(module)} ^ {*vars(copies[name])})
            }
            known = {name for used in program.used for name in used or () if name.rpartition(".")[0] not in others}
            new = {name for name in names if name not in known or name.rpartition(".")[0] in program.embeddings}
            used = [frozenset((found or names) & names | new) for found in program.used]
            program = dataclasses.replace(program, used=used, embeddings=frozenset())
            for piece in self.pieces:
                if isinstance(piece, (Phase, LayerCall)):
                    piece.program = program
                if isinstance(piece, Phase):
                    piece.copy = copy_with_stubs(self.model, self.layers)
        made = dataclasses.replace(self, reading=reading)
        made.sync()
        return made


def _names_outside(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in inside}


def _read(model: nn.Module, layers: Mapping[str, nn.Module]) -> ModelReading:
    return ModelReading(model, layers.values() or [model])  # a model that was not split is its own layer


def cut(
    model: nn.Module,
    example: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
    skip_modules: Sequence[nn.Module] = (),
) -> Cut:
    """Split a transformers model into the modules of a pipeline.

    A run of the model's forward on an example finds the layers and the model's own code around the layers. A check
    compares outputs and gradients of the split model with those of the original model. If the check fails, the model is
    split at fewer layers. If no split is possible, the whole model is one module, and the report states the reason.

    Args:
        model: a Hugging Face model, or any module that keeps its layers in an ``nn.ModuleList``. A model on ``meta`` is
            split without a comparison.
        example: keyword arguments of the model's forward; two rows are enough. Later batches must run the same code of
            the model as the example, so include images if batches have images. The default example is a few tokens,
            with one row padded.
        check: whether to compare the split and the original model, by a forward and backward of each on the host.
        skip_modules: modules, such as lists of layers, in which the model is not split.

    Returns:
        The modules of the split model, and a report.

    Raises:
        CutError: the model does not run on the example.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> [type(piece).__name__ for piece in cut(LlamaForCausalLM(tiny)).pieces]
    ['Phase', 'LayerCall', 'LayerCall', 'Phase']
    """
    kwargs = plain_rows(without_cache(model, dict(example if example is not None else example_inputs(model))))
    if asked_for(model, kwargs) != "none":
        install_hooks(model)
    # parameters on meta have no values, so calls can be observed, but outputs cannot be compared
    is_planned = any(p.is_meta for p in model.parameters())
    if is_planned:
        kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    refused: list[tuple[str, str]] = []

    def does_not_run(error: Exception) -> CutError:
        return CutError(
            "example",
            f"{type(model).__name__} does not run on the example ({', '.join(kwargs)}): {type(error).__name__}: {error}"
            "\nPass a batch that the model accepts:\n    cut(model, example=batch)",
        )

    def refuse(error: Exception) -> None:
        of_cut = (error.reason, str(error)) if isinstance(error, CutError) else None
        refused.append(of_cut or ("structure", f"{type(error).__name__}: {error}"))

    with checking(model), torch.autocast("cpu", enabled=False):  # rounding would hide differences
        lists = candidates(model)
        with raised_as(does_not_run), torch.no_grad():  # a model may raise any error for an unsupported example
            layers = {name: layer for one in lists for name, layer in one.layers.items()}
            names = {call.layer for call in observe(layers, lambda: model(**kwargs))[0]}
        called = [one for one in lists if not names.isdisjoint(one.layers)]
        if example is None and not is_planned:
            kwargs = with_labels(model, kwargs)
        skip = {id(inner) for module in skip_modules for inner in module.modules()}
        allowed = [one for one in called if not any(id(layer) in skip for layer in one.layers.values())]
        # stages for a list with less than a tenth of the largest list's parameters cost more time than they save memory
        large = [one for one in allowed if one.size * 10 >= allowed[0].size]
        for chosen in [large, large[:1]][: len(large)]:  # all lists, then the largest one alone
            # a model may raise any error when stubs replace its layers
            attempt = partial(_try, model, chosen, kwargs, check and not is_planned, refused)
            if (made := result_or(attempt, refuse)) is not None:
                return made
    if not refused:
        refused.append(("layers", "The model has no list of two or more modules with parameters."))
    return whole(model, refused)


def whole(model: nn.Module, refused: Sequence[tuple[str, str]] = ()) -> Cut:
    size = sum(map(stored_bytes, model.parameters()))
    report = CutReport(type(model).__name__, (), (type(model).__name__,), (size,), None, tuple(refused))
    return Cut.of(model, [Whole(model)], report, {})


def _try(
    model: nn.Module, chosen: Sequence[Candidate], kwargs: Kwargs, check: bool, refused: Sequence[tuple[str, str]]
) -> Cut:
    layers = {name: layer for candidate in chosen for name, layer in candidate.layers.items()}
    with torch.no_grad():
        calls, _ = observe(layers, lambda: model(**kwargs))
        if not calls:
            raise CutError("layers", f"{type(model).__name__} calls none of the modules {', '.join(layers)}.")
        inside = {id(module) for layer in layers.values() for module in layer.modules()}
        embeddings = frozenset(
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and id(module) not in inside
        )
        program = CutPlan(calls, (), embeddings=embeddings)
        copies: list[_Copy] = []
        while not program.ends:
            try:
                program = _run(program, model, layers, kwargs, copies)
            # the trial has shown that a later phase needs the output of an embedding or of a layer
            except MissingEmbeddingError as missing:
                program = dataclasses.replace(program, embeddings=program.embeddings - {missing.name})
                copies = []
            except MissingValueError as missing:
                if missing.key in program.keep:
                    raise CutError("structure", f"{missing}") from missing
                program = dataclasses.replace(program, keep=program.keep | {missing.key})
        del copies
    pieces = pieces_of(model, layers, program)
    named = dict(model.named_parameters(remove_duplicate=False))
    sizes = []
    for piece in pieces:
        read = program.used[piece.number] or () if isinstance(piece, Phase) else ()
        held = [named[name] for name in read] if isinstance(piece, Phase) else list(piece.parameters())
        sizes.append(sum(part.nbytes for part in parts_of(held)))
    paths, names = tuple(one.path for one in chosen), tuple(program.names())
    report = CutReport(type(model).__name__, paths, names, tuple(sizes), None, tuple(refused))
    made = Cut.of(model, pieces, report, layers)
    if not check:
        return made
    equivalence = check_equivalence(model, pieces, (), kwargs)
    return dataclasses.replace(made, report=dataclasses.replace(made.report, equivalence=equivalence))


def pieces_of(model: nn.Module, layers: Mapping[str, nn.Module], program: CutPlan) -> list[nn.Module]:
    pieces, start = list[nn.Module](), 0
    for phase, end in enumerate(program.ends):
        pieces.append(Phase(program, phase, copy_with_stubs(model, layers, program.embeddings)))
        pieces += [LayerCall(program, place, layers[program.calls[place].layer]) for place in range(start, end)]
        start = end
    return pieces


# With more phases, a model is better not split, because each phase repeats the code of all earlier phases.
_MOST_PHASES = 300
_Copy: TypeAlias = tuple[nn.Module, set[str]]  # a copy of the model, and names of the parameters that it has read


def _run(
    program: CutPlan, model: nn.Module, layers: Mapping[str, nn.Module], kwargs: Kwargs, copies: list[_Copy]
) -> CutPlan:
    ends, keep = list[int](), set(program.keep)
    reads: dict[int, frozenset[Entry]] = {}
    state = begin((), kwargs, model)
    while True:
        number = len(ends)
        if number == len(copies):
            # each phase has its own copy, as in the pipeline, because a module that caches a value computed from a
            # parameter reads the parameter in its first call only
            made, read = copy_with_stubs(model, layers, program.embeddings), set[str]()
            copies.append((made, read))
            for path, module in made.named_modules():
                module.__dict__["_parameters"] = _Tracked(module._parameters, f"{path}." if path else "", read)
        trial = dataclasses.replace(program, ends=[*ends, len(program.calls)], keep=frozenset(keep))
        result = Phase(trial, number, copies[number][0]).advance(state)
        if isinstance(result, Finished):
            ends.append(len(program.calls))
            check_apart([call.layer for call in program.calls], reads)
            # other batches may use parameters that the example did not use
            reads_of = [read for _, read in copies[: len(ends)]]
            unread = _names_outside(model, layers).difference(*reads_of)
            used = [frozenset(read | unread) for read in reads_of]
            return dataclasses.replace(program, ends=ends, keep=frozenset(keep), used=used, cache_reads=reads)
        state = result
        keep |= state.call_log.needed  # the next phase reads them
        start, end = (ends[-1] if ends else 0), max(state.call_log.calls) + 1
        for place in range(start, end):
            trial = dataclasses.replace(trial, keep=frozenset(keep))
            layer = program.calls[place].layer
            made_by_model = (EmptyCache, MadeCache)
            has_caches = any(isinstance(one, made_by_model) for one in state.call_log.calls[place].arguments.leaves)
            with raised_as(partial(_fails_alone, layer), CutError) if has_caches else contextlib.nullcontext():
                state, reads[place] = LayerCall(trial, place, layers[layer]).observe(state)
        ends.append(end)
        if len(ends) > _MOST_PHASES:
            raise CutError(
                "structure",
                f"The model runs code outside of its layers {len(ends)} times or more, too often for a split.",
            )


def _fails_alone(layer: str, error: Exception) -> CutError:
    return CutError(
        "structure",
        f"{layer} gets a cache that the model made, and fails without the entries that other layers write into it: "
        f"{type(error).__name__}: {error}",
    )


class _Tracked(dict[str, Any]):
    """A dictionary of a module's parameters, which adds the name of each parameter that is read to a set."""

    def __init__(self, held: dict[str, Any], prefix: str, read: set[str]) -> None:
        super().__init__(held)
        self._prefix, self._read = prefix, read

    def __getitem__(self, name: str) -> Any:
        if (found := super().__getitem__(name)) is not None:
            self._read.add(self._prefix + name)
        return found


@dataclasses.dataclass(frozen=True)
class PassedTensor:
    """A tensor that passes between the modules of a split model.

    Attributes:
        name: name of the argument of the first layer that takes the tensor, or name of a captured output.
        kind: where the tensor comes from. ``"hidden"``: the hidden state, passed from layer to layer. ``"side"``: a
            tensor, such as a mask, that code outside of the layers passes to layers. ``"carried"``: an output of a
            layer, except the hidden state, that code after the layer reads. ``"captured"``: captured in a layer by
            hooks for the output of the model.
        shape: shape of the tensor for the example inputs.
        bytes: number of bytes of the tensor for the example inputs.
        made: index of the module that produces the tensor.
        read: indices of the modules that receive the tensor, in order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    made: int
    read: tuple[int, ...]


def passed_tensors(made: Cut, example: Mapping[str, Any] | None = None) -> list[PassedTensor]:
    """Return the tensors that pass between the modules of a split model, in the order of their creation.

    The arguments of the model are not included, because every module that runs code outside of the layers gets them.

    Args:
        made: split model, whose parameters may be on ``meta``.
        example: keyword arguments of the model, named as in the example for the split. Default: a few tokens.

    Returns:
        The tensors that pass between modules; an empty list if the model was not split.

    Raises:
        BatchStructureError: the model's forward takes a different branch for ``example`` than when the model was split.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> for found in passed_tensors(cut(LlamaForCausalLM(config)))[:2]:
    ...     print(found.kind, found.name, found.shape, found.made, found.read)
    hidden hidden_states (2, 12, 16) 0 (1,)
    side attention_mask (2, 1, 12, 12) 0 (1, 2)
    """
    if made.program is None:
        return []
    kwargs = without_cache(made.model, dict(example if example is not None else example_inputs(made.model)))
    if any(p.is_meta for p in made.model.parameters()):
        kwargs = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    seen: dict[Any, tuple[torch.Tensor, int, list[int]]] = {}  # tensor, module that made it, modules that read it
    state = begin((), kwargs, made.model)
    last = len(made.pieces) - 1
    with evaluating(made.model), torch.no_grad():
        for number, piece in enumerate(made.pieces[:last]):
            read = [*_contents(state)]  # code outside of layers may read any tensor
            state = piece(state) if number else piece(**kwargs)
            if isinstance(piece, LayerCall):
                call = state.call_log.calls.get(piece.place)
                boxes = {use.number for use in call.boxes()} if call is not None else set()
                keys = call.arguments.keys() if call is not None else set()
                read = [key for key in read if (key in keys if isinstance(key, Key) else key[0] in boxes)]
            for key in read:
                seen[key][2].append(number)
            for key, tensor in _contents(state).items():
                seen.setdefault(key, (tensor, number, []))
    for key in _contents(state):
        seen[key][2].append(last)
    words = _Names(made.program, state.call_log, made.layers)
    return [
        PassedTensor(
            words.name(key), words.kind(key, tuple(read), number), tuple(one.shape), one.nbytes, number, tuple(read)
        )
        for key, (one, number, read) in seen.items()
        if read
    ]


def _contents(state: CutState) -> dict[Any, torch.Tensor]:
    # the key of a tensor inside a list or dictionary: number of the container, and path of the tensor in it
    boxes = [(number, pytree.tree_flatten_with_path(content)[0]) for number, content in state.boxes.items()]
    held = [(number, path, leaf) for number, leaves in boxes for path, leaf in leaves]
    inside = {(n, pytree.keystr(path)): leaf for n, path, leaf in held if isinstance(leaf, torch.Tensor)}
    return {**state.values, **inside}


class _Names:
    """Finds the name and the kind of each tensor that passes between modules of a split model."""

    def __init__(self, program: CutPlan, call_log: CallLog, layers: Mapping[str, nn.Module]) -> None:
        self._program = program
        self._names: dict[Any, str] = {}
        self._hidden: set[str] = set()
        self._captured = {
            leaf: path for tree in call_log.captured.values() for path, leaf in _leaves(tree) if isinstance(leaf, Key)
        }
        for place, call in sorted(call_log.calls.items()):
            parameters = list(inspect.signature(layers[program.calls[place].layer].forward).parameters)
            for path, leaf in _leaves(call.arguments):
                if not isinstance(leaf, (Key, BoxUse)):
                    continue
                which = path[1]  # path[0] is args or kwargs
                if isinstance(which, pytree.MappingKey):
                    name = f"{which.key}{pytree.keystr(path[2:])}"
                else:
                    known = which.idx < len(parameters)
                    name = f"{parameters[which.idx] if known else f'args[{which.idx}]'}{pytree.keystr(path[2:])}"
                self._names.setdefault(leaf.number if isinstance(leaf, BoxUse) else leaf, name)
                if self._is_main(leaf) and leaf.call == place - 1:
                    self._hidden.add(name)

    def name(self, key: Any) -> str:
        if not isinstance(key, Key):
            return f"{self._names.get(key[0], 'box')}{key[1]}"
        if key in self._captured:
            return str(self._captured[key][0].key)
        name = self._names.get(key)
        return name or (f"output {key.leaf}" if self._program.is_extra(*key) else "hidden_states")

    def kind(self, key: Any, read: tuple[int, ...], made: int) -> str:
        if key in self._captured:
            return "captured"
        if isinstance(key, Key) and key.call < 0:
            is_first = self._names.get(key) in self._hidden and read == (made + 1,)
            return "hidden" if is_first else "side"
        return "hidden" if self._is_main(key) and read[0] == made + 1 else "carried"

    def _is_main(self, key: Any) -> TypeGuard[Key]:
        return isinstance(key, Key) and not self._program.is_extra(*key)


def _leaves(tree: Tree) -> Iterator[tuple[Any, Any]]:
    numbered = pytree.tree_unflatten(list(range(len(tree.leaves))), tree.spec)
    for path, number in pytree.tree_flatten_with_path(numbered)[0]:
        yield path, tree.leaves[number]
