"""``cut``: cut a transformers model into pieces of a pipeline by record and replay, without code per architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.recipe.aliases import Kwargs

from ...device.composite import parts_of, stored_bytes
from ...errors import StageError
from ...pipeline.live import ModelReading, changed_layers, read_model
from ..errors import CutError
from .capture import asked_for, install_hooks
from .check import check_equivalence, checking
from .cut_plan import CutPlan
from .discover import discover
from .example import example_inputs, plain_rows, without_cache
from .example_labels import with_labels
from .layers import Candidate, candidates, observe
from .pieces import LayerCall, Phase, Whole
from .report import CutReport
from .stub import copy_with_stubs, sync


@dataclasses.dataclass(frozen=True, repr=False)
class Cut:
    """A model in pieces that a pipeline can run one after the other: all that was read off the model.

    Attributes:
        model: Original model, whose parameters the pieces share.
        pieces: Modules of the pipeline. The first one takes the arguments of the model, the last one returns its
            output; a model that could not be cut is the only piece.
        report: Result of the cut in words and numbers.
        layers: Modules that were cut out, by name.
        reading: What the model was made of when it was read.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> list(cut(LlamaForCausalLM(config), check=False).layers)
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
        """Return the cut of a model as it is now.

        Args:
            model: The model, which is read.
            pieces: Modules of the pipeline, in order.
            report: Result of the cut in words and numbers.
            layers: Modules that were cut out, by name.
        """
        made = cls(model, pieces, report, layers, _read(model, layers))
        made.sync()
        return made

    def __repr__(self) -> str:
        return f"Cut of {self.report}"

    @property
    def program(self) -> CutPlan | None:
        """Plan of the cut; ``None`` for a model in one piece."""
        first = self.pieces[0]
        return first.program if isinstance(first, Phase) else None

    def sync(self) -> None:
        """Give the pieces the mode, the parameters and the plain attributes that the model has now."""
        for piece in self.pieces:
            piece.training = self.model.training
            if isinstance(piece, Phase):
                sync(piece.copy, self.model, piece.program.used[piece.number])

    def current(self) -> Cut:
        """Return the cut of the model as it is now: this one if nothing was changed.

        Raises:
            StageError: layers were removed, added, replaced or moved.
        """
        reading = _read(self.model, self.layers)
        if reading.matches(self.reading):
            self.sync()
            return self
        lists = {path: _children(self.model, path) for path in self.report.lists}
        if changed := changed_layers(self.layers, {name: one for held in lists.values() for name, one in held.items()}):
            raise StageError(
                f"{self.report.model} was wrapped, and then {changed}. Wrap it again:\n"
                "    pipeline = wrap_model_to_roundpipe(pipeline.cut.model, devices=pipeline.devices)"
            )
        if self.layers:
            self._renew()
        made = dataclasses.replace(self, reading=reading)
        made.sync()
        return made

    def _renew(self) -> None:
        """Copy the model's own code again, after its modules, functions or objects changed.

        It is not known which phases read new parameters, so all phases get them; nor whether later phases still pass
        the outputs of embeddings to layers only, so all phases compute them.
        """
        program = self.program
        assert program is not None
        inside = {id(p) for layer in self.layers.values() for p in layer.parameters()}
        names = {name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) not in inside}
        others = self._modules_of_other_classes()
        known = {name for used in program.used for name in used or () if name.rpartition(".")[0] not in others}
        new = {name for name in names if name not in known or name.rpartition(".")[0] in program.embeddings}
        used = [frozenset((found or names) & names | new) for found in program.used]
        program = dataclasses.replace(program, used=used, embeddings=frozenset())
        for piece in self.pieces:
            if isinstance(piece, (Phase, LayerCall)):
                piece.program = program
            if isinstance(piece, Phase):
                piece.copy = copy_with_stubs(self.model, self.layers)

    def _modules_of_other_classes(self) -> set[str]:
        """Names of modules whose code is another one than that of their copies."""
        first = self.pieces[0]
        assert isinstance(first, Phase)
        copies = dict(first.copy.named_modules())
        return {
            name
            for name, module in self.model.named_modules()
            if name in copies
            and (not isinstance(copies[name], type(module)) or "forward" in {*vars(module)} ^ {*vars(copies[name])})
        }


def _read(model: nn.Module, layers: Mapping[str, nn.Module]) -> ModelReading:
    return read_model(model, layers.values() or [model])  # one piece runs the model itself


def _children(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """The modules of a list now, by their names in the model; none where the list is gone."""
    found = result_or(lambda: model.get_submodule(path), lambda error: None)
    return {} if found is None else {f"{path}.{key}": one for key, one in found._modules.items() if one is not None}


def cut(
    model: nn.Module,
    example: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
    skip_modules: Sequence[nn.Module] = (),
) -> Cut:
    """Cut a transformers model into the pieces of a pipeline.

    The layers, and the model's own code around them, are found by running its forward on an example. Then the pieces
    are run next to the model, and every output and gradient is compared. Where something differs, fewer layers are cut,
    down to none: then the model is one piece, and the report states the reason.

    Args:
        model: a model of transformers, or any module that keeps its layers in an ``nn.ModuleList``. Parameters on
            ``meta`` are enough for a plan; nothing is compared then.
        example: keyword arguments of its forward. Two rows are enough, but they must take the same path through
            the model as later batches: with pictures, if those have pictures. Default: a few tokens, one row padded.
        check: whether to compare the pieces with the model. It costs a forward and a backward of the example on the
            host, twice.
        skip_modules: lists of layers, or modules around them, that are not to be cut.

    Returns:
        The pieces and a report.

    Raises:
        CutError: the model does not run on the example.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> [type(piece).__name__ for piece in cut(LlamaForCausalLM(config)).pieces]
    ['Phase', 'LayerCall', 'LayerCall', 'Phase']
    """
    kwargs = plain_rows(without_cache(model, dict(example if example is not None else example_inputs(model))))
    if asked_for(model, kwargs) != "none":
        install_hooks(model)
    # parameters on meta have no values: the calls can be observed, but no outputs compared
    is_planned = any(p.is_meta for p in model.parameters())
    if is_planned:
        kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    refused: list[tuple[str, str]] = []
    with checking(model), torch.autocast("cpu", enabled=False):  # which would round, and be compared with itself
        called = _called(model, candidates(model), kwargs)
        if example is None and not is_planned:
            kwargs = with_labels(model, kwargs)
        for chosen in _choices(called, skip_modules):
            # the code of a model raises what it likes where stubs take the place of its layers
            attempt = partial(_try, model, chosen, kwargs, check and not is_planned, refused)
            if (made := result_or(attempt, lambda error: refused.append(_reason(error)))) is not None:
                return made
    if not refused:
        refused.append(("layers", "There is no list of two or more modules with parameters."))
    return whole(model, refused)


def _reason(error: Exception) -> tuple[str, str]:
    """The reason and the message of a cut that failed."""
    if isinstance(error, CutError):
        return error.reason, str(error)
    return "structure", f"{type(error).__name__}: {error}"


def whole(model: nn.Module, refused: Sequence[tuple[str, str]] = ()) -> Cut:
    """Return a model as one piece."""
    # refused: reason and message of each cut that was tried before
    report = CutReport(type(model).__name__, (), (type(model).__name__,), (_bytes(model),), None, tuple(refused))
    return Cut.of(model, [Whole(model)], report, {})


def _called(model: nn.Module, found: Sequence[Candidate], kwargs: Kwargs) -> list[Candidate]:
    """The lists of which the forward calls at least one element."""
    layers = {name: layer for one in found for name, layer in one.layers.items()}

    def refused(error: Exception) -> CutError:
        return CutError(
            "example",
            f"{type(model).__name__} does not run on the example ({', '.join(kwargs)}): {type(error).__name__}: {error}"
            "\nGive it one:\n    cut(model, example=batch)",
        )

    with raised_as(refused), torch.no_grad():  # a model raises what it likes on an example that it does not take
        calls, _ = observe(layers, lambda: model(**kwargs))
    names = {call.layer for call in calls}
    return [one for one in found if not names.isdisjoint(one.layers)]


def _choices(found: Sequence[Candidate], skipped: Sequence[nn.Module]) -> list[list[Candidate]]:
    """The choices of lists to cut, best first: all that are worth it, then the largest alone."""
    skip = {id(inner) for module in skipped for inner in module.modules()}
    allowed = [one for one in found if not any(id(layer) in skip for layer in one.layers.values())]
    # a list with less than a tenth of the largest one's parameters costs more stages than it saves memory
    worth = [one for one in allowed if one.size * 10 >= allowed[0].size]
    choices = [worth, allowed[:1]] if len(worth) > 1 else [worth]
    return [choice for choice in choices if choice]


def _try(
    model: nn.Module,
    chosen: Sequence[Candidate],
    kwargs: Kwargs,
    check: bool,
    refused: Sequence[tuple[str, str]],
) -> Cut:
    layers = {name: layer for candidate in chosen for name, layer in candidate.layers.items()}
    program = discover(model, layers, (), kwargs)
    pieces = pieces_of(model, layers, program)
    made = Cut.of(model, pieces, _report(model, chosen, program, pieces, refused), layers)
    if not check:
        return made
    equivalence = check_equivalence(model, pieces, (), kwargs)
    return dataclasses.replace(made, report=dataclasses.replace(made.report, equivalence=equivalence))


def pieces_of(model: nn.Module, layers: Mapping[str, nn.Module], program: CutPlan) -> list[nn.Module]:
    """Return the modules of the pipeline for a plan."""
    pieces: list[nn.Module] = []
    start = 0
    for phase, end in enumerate(program.ends):
        pieces.append(Phase(program, phase, copy_with_stubs(model, layers, program.embeddings)))
        for place in range(start, end):
            pieces.append(LayerCall(program, place, layers[program.calls[place].layer]))
        start = end
    return pieces


def _report(
    model: nn.Module,
    chosen: Sequence[Candidate],
    program: CutPlan,
    pieces: Sequence[nn.Module],
    refused: Sequence[tuple[str, str]],
) -> CutReport:
    used = [frozenset(program.used[i] or ()) for i in range(program.phases)]
    named = dict(model.named_parameters(remove_duplicate=False))
    sizes = []
    for piece in pieces:
        held = [named[n] for n in used[piece.number]] if isinstance(piece, Phase) else list(piece.parameters())
        sizes.append(sum(part.nbytes for part in parts_of(held)))
    return CutReport(
        type(model).__name__,
        tuple(one.path for one in chosen),
        tuple(program.names()),
        tuple(sizes),
        None,
        tuple(refused),
    )


def _bytes(module: nn.Module) -> int:
    return sum(map(stored_bytes, module.parameters()))
