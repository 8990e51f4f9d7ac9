"""The columns of the matrix, one function each: what is asked of every type.

A column returns details to record, or raises; the exception's first line is the reason in the table. What a column
needs of an earlier one (a program to replay) it takes from the `Trial`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from yobx_flatten import DecodeSizes

from .inputs import NoCacheError, cache_name, decode, go_on, loop
from .media import PictureEncoder, picture_of
from .models import make_model, window_of
from .ways import Way

__all__ = ["COLUMNS", "NEEDS", "TOLERANCE", "DifferenceError", "NoCacheError", "SkipColumnError", "Trial", "load"]

TOLERANCE = 1e-4
# what is exported, and what else a program must serve
EXAMPLE = DecodeSizes(2, 5, 3)
OTHER = DecodeSizes(3, 6, 3)


class DifferenceError(ArithmeticError):
    """What came out is not what the model itself computes."""


class SkipColumnError(RuntimeError):
    """The column does not apply to this type, or to this way of exporting."""


@dataclasses.dataclass
class Trial:
    """One type on its way through the columns.

    Attributes:
        name: the type.
        way: how caches are flattened and programs are made.
        folder: where files may be written.
    """

    name: str
    way: Way
    folder: pathlib.Path
    _inputs: dict[DecodeSizes, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def model(self) -> Any:
        """The model, built once."""
        return make_model(self.name)

    @functools.cached_property
    def window(self) -> int | None:
        """Tokens after which something is forgotten."""
        return window_of(self.model.config)

    def inputs(self, sizes: DecodeSizes) -> dict[str, Any]:
        """Decode inputs of these sizes, a new copy every time."""
        if sizes not in self._inputs:
            self._inputs[sizes] = decode(self.model, sizes, seed=sizes.past)
        return copy.deepcopy(self._inputs[sizes])

    @functools.cached_property
    def program(self) -> Any:
        """The exported program, exported once."""
        return self.export(EXAMPLE)

    def export(self, sizes: DecodeSizes) -> Any:
        """Export a decode call of these sizes."""
        kwargs = self.inputs(sizes)
        with self.way.block(self.model):
            return self.way.export(self.model, kwargs)

    @functools.cached_property
    def onnx_report(self) -> Any:
        """What `export_onnx` states of the example, other sizes, and more than the window holds."""
        from yobx_flatten import Case, ReplayError, export_onnx

        if not self.way.is_ours:
            raise SkipColumnError("compared up to torch.export only")
        cases = [Case(str(one), (), self.inputs(one), 3) for one in (OTHER, self.past_the_window)]
        try:
            path = self.folder / "model.onnx"
            return export_onnx(self.model, (), self.inputs(EXAMPLE), path, cases=cases).report
        except ReplayError as error:
            return error.report

    @property
    def past_the_window(self) -> DecodeSizes:
        """Sizes with more tokens seen than any window holds, or simply many."""
        return DecodeSizes(2, 2 * self.window + 4 if self.window and self.window <= 64 else 40, 3)


# -- building --------------------------------------------------------------------------------------------------------


def built(trial: Trial) -> dict[str, Any]:
    """Build the model."""
    model = trial.model
    return {"model": type(model).__name__, "parameters": sum(weight.numel() for weight in model.parameters())}


def prefill(trial: Trial) -> dict[str, Any]:
    """Run a prefill and look at the cache that comes out."""
    kwargs = trial.inputs(EXAMPLE)
    cache = kwargs[cache_name(trial.model)]
    other = decode(trial.model, EXAMPLE, seed=1234)
    name = cache_name(trial.model)
    ours, theirs = loop(trial.model, kwargs, 1), loop(trial.model, {**kwargs, name: other[name]}, 1)
    return {
        "cache": type(cache).__name__,
        "layers": _layer_names(cache),
        "window": trial.window,
        "argument": name,
        "picture": _has_picture(kwargs),
        # how much the logits depend on what the cache holds
        "sensitivity": _significant(_difference(ours, theirs)),
    }


def _has_picture(kwargs: dict[str, Any]) -> bool:
    """Return whether the cache has seen a picture: the prompt is longer than the tokens that were asked for."""
    mask = kwargs.get("attention_mask")
    longer = isinstance(mask, torch.Tensor) and "input_ids" in kwargs and mask.shape[1] > EXAMPLE.past + EXAMPLE.new
    return longer or any(name.startswith("image_") for name in kwargs)


def _layer_names(cache: Any) -> list[str]:
    inner = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    caches = [one for one in inner if one is not None] or [cache]
    return sorted({type(layer).__name__ for one in caches for layer in getattr(one, "layers", [])})


# -- flattening ------------------------------------------------------------------------------------------------------


def round_trip(trial: Trial) -> dict[str, Any]:
    """Flatten and unflatten the cache; the next 8 generated steps must be bitwise identical."""
    leaves = 0
    for sizes in (EXAMPLE, trial.past_the_window):
        kwargs = trial.inputs(sizes)
        cache = kwargs[cache_name(trial.model)]
        expected = go_on(trial.model, kwargs, copy.deepcopy(cache))
        with trial.way.block(trial.model):
            flat, spec = pytree.tree_flatten(cache)
            if any(leaf is cache for leaf in flat):
                raise DifferenceError(f"{type(cache).__name__} is a leaf: it is not flattened")
            rebuilt = pytree.tree_unflatten(flat, spec)
        if rebuilt is cache:
            raise DifferenceError("unflatten handed back the very same cache")
        leaves = len(flat)
        found = go_on(trial.model, trial.inputs(sizes), rebuilt)
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(ours, theirs) and not _same_with_nans(ours, theirs):
                raise DifferenceError(
                    f"past {sizes.past}, step {step}: logits differ by {_difference([ours], [theirs]):.1e}"
                )
    return {"leaves": leaves}


# -- exporting -------------------------------------------------------------------------------------------------------


def export(trial: Trial) -> dict[str, Any]:
    """Export one decode call of 3 tokens after 5, batch 2."""
    return {"nodes": len(trial.program.graph.nodes)}


def _replay(trial: Trial, sizes: DecodeSizes, program: Any = None) -> dict[str, Any]:
    expected = loop(trial.model, trial.inputs(sizes))
    kwargs = trial.inputs(sizes)
    if not trial.way.is_ours:
        kwargs.pop("use_cache", None)
    with trial.way.block(trial.model):
        found = loop((program or trial.program).module(), kwargs)
    return _compare(found, expected)


def same_shape(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps in the sizes of the example, with other values."""
    return _replay(trial, EXAMPLE)


def other_sizes(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps of 3 tokens after 6, batch 3."""
    return _replay(trial, OTHER)


def two_tokens(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps of 2 tokens after 6, batch 3."""
    return _replay(trial, DecodeSizes(3, 6, 2))


def one_token(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps of one token after 7, batch 3: what generating does.

    A program of 3 tokens may have unrolled a loop over them. Then one of its own, exported from a call of one token,
    must serve other batches and lengths.
    """
    sizes = DecodeSizes(3, 7, 1)
    try:
        return _replay(trial, sizes)
    except Exception:  # whatever a program raises for sizes that it was not made for
        own = trial.export(DecodeSizes(2, 5, 1))
        results = [_replay(trial, one, own) for one in (sizes, dataclasses.replace(trial.past_the_window, new=1))]
        return {"difference": max(result["difference"] for result in results), "own": True}


def past_the_window(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps where more tokens were seen than the window holds, or 40 where there is none."""
    return _replay(trial, trial.past_the_window)


def left_padding(trial: Trial) -> dict[str, Any]:
    """Replay 3 decode steps where the first row begins with 3 tokens of padding."""
    sizes = DecodeSizes(3, 6, 3, padding=3)
    if not {"attention_mask", "decoder_attention_mask"} & set(trial.inputs(sizes)):
        raise SkipColumnError("decode calls of this model take no mask")
    return _replay(trial, sizes)


def saved(trial: Trial) -> dict[str, Any]:
    """Store the program, load it in a new process, and replay one call there."""
    expected = loop(trial.model, trial.inputs(OTHER), 1)[0]
    kwargs = trial.inputs(OTHER)
    if not trial.way.is_ours:
        kwargs.pop("use_cache", None)
    with trial.way.block(trial.model):
        torch.export.save(trial.program, trial.folder / "program.pt2")
        leaves = pytree.tree_leaves(((), kwargs))
    torch.save({"leaves": leaves, "expected": expected}, trial.folder / "saved.pt")
    return {}


def load(way: Way, folder: pathlib.Path) -> dict[str, Any]:
    """Load what `saved` stored, and replay it: the second half of that column, in a process that saw no model."""
    stored = torch.load(folder / "saved.pt", weights_only=False)
    with way.block(None):
        program = torch.export.load(folder / "program.pt2")
        _, kwargs = pytree.tree_unflatten(stored["leaves"], program.call_spec.in_spec)
        with torch.no_grad():
            outputs = program.module()(**kwargs)
    return _compare([outputs.logits], [stored["expected"]])


# -- ONNX ------------------------------------------------------------------------------------------------------------


def onnx(trial: Trial) -> dict[str, Any]:
    """Convert to ONNX with `export_onnx`."""
    report = trial.onnx_report
    if report.onnx_bytes is None:
        raise DifferenceError("export_onnx wrote no file")
    return {"bytes": report.onnx_bytes, "operators": report.operators}


def onnxruntime_loop(trial: Trial) -> dict[str, Any]:
    """Run the ONNX file for 3 steps over its own outputs: the example, other sizes, past the window."""
    results = [case for case in trial.onnx_report.cases if case.runtime == "onnxruntime"]
    if not results:
        raise SkipColumnError("there is no ONNX file")
    for case in results:
        if case.error is not None:
            raise DifferenceError(f"{case.case}: {case.error}")
        if not case.max_difference <= TOLERANCE:
            raise DifferenceError(f"{case.case}: outputs differ by {case.max_difference:.1e}")
    return {"difference": _significant(max(case.max_difference for case in results))}


# -- pictures --------------------------------------------------------------------------------------------------------


def picture(trial: Trial) -> dict[str, Any]:
    """Export the encoder of two pictures, and run the program on two others."""
    found = [picture_of(trial.model, 2, torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    if found[0] is None or found[1] is None:
        raise SkipColumnError("there is no picture that we know how to make for this model")
    (example, _), (other, _) = found
    encoder = PictureEncoder(trial.model)
    shapes = {name: dict.fromkeys(range(given.dim()), torch.export.Dim.AUTO) for name, given in example.items()}
    with trial.way.block(trial.model), torch.no_grad():
        program = torch.export.export(encoder, (copy.deepcopy(example),), dynamic_shapes=(shapes,))
        return _compare([program.module()(copy.deepcopy(other))], [encoder(other)])


# -- comparing -------------------------------------------------------------------------------------------------------


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours.shape != theirs.shape:
            raise DifferenceError(f"step {step}: logits of shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        difference = _difference([ours], [theirs])
        if not difference <= TOLERANCE:
            raise DifferenceError(f"step {step}: logits differ by {difference:.1e}")
    return {"difference": _significant(_difference(found, expected))}


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.double() - theirs.double()).abs()
        difference[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0
        largest = difference.max().item() if difference.numel() else 0.0
        worst = max(worst, float("inf") if largest != largest else largest)
    return worst


def _same_with_nans(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and _difference([ours], [theirs]) == 0.0


def _significant(value: float) -> float:
    return float(f"{value:.2g}")


COLUMNS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "built": built,
    "prefill": prefill,
    "round trip": round_trip,
    "export": export,
    "same shape": same_shape,
    "other batch and length": other_sizes,
    "two tokens": two_tokens,
    "one token": one_token,
    "past the window": past_the_window,
    "left padding": left_padding,
    "save and load": saved,
    "onnx": onnx,
    "onnxruntime": onnxruntime_loop,
    "picture": picture,
}

# What must have passed before a column is tried.
NEEDS: dict[str, str] = {
    "prefill": "built",
    "round trip": "prefill",
    "export": "prefill",
    **dict.fromkeys(("same shape", "other batch and length", "two tokens", "one token"), "export"),
    **dict.fromkeys(("past the window", "left padding", "save and load"), "export"),
    "onnx": "prefill",
    "onnxruntime": "onnx",
    "picture": "built",
}
