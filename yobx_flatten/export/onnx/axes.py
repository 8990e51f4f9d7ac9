"""Name the axes of an ONNX file as optimum does; equal axes share one name.

=========================================  ===========================================================
``batch_size``                             rows
``sequence_length``                        tokens of this call
``past_sequence_length``                   tokens in the cache
``total_sequence_length``                  both, as the mask has it (optimum writes the sum)
``past_window_length``                     tokens that a layer which slides has kept
``decoder_sequence_length`` and so on      the same of a decoder with an encoder
``encoder_sequence_length``, ``.._out``    what the encoder reads, and keys made of it
=========================================  ===========================================================

torch names an axis by a symbol (``s43``), and two axes that are equal in every call may have two of them, since nothing
in the program states that they are. Two axes of different sizes in the example never share a name: onnxruntime would
take the memory of one for the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...huggingface.cache_names import CACHE, PRESENT

if TYPE_CHECKING:
    import onnx_ir as ir

_SUM = re.compile(r"(\w+) \+ (past_\w+)")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_CACHE = re.compile(rf"{CACHE}\.(\d+)\.(?:(decoder|encoder)\.)?(key|value)")
_ENCODER = ("encoder_hidden_states", "encoder_outputs.", "encoder_attention_mask", "decoder_input_ids")


def name_axes(
    model: ir.Model, chosen: Mapping[tuple[str, int], str] | None = None, sizes: Mapping[str, int] | None = None
) -> None:
    """Rename the axes of a graph in place."""
    # model: an `onnx_ir.Model` whose inputs and outputs have their names already
    # sizes: the size of each symbol in the example, as far as it is known
    import onnx_ir as ir

    graph = model.graph
    names = _names_of_symbols(graph, dict(chosen or {}), sizes or {})
    if not names:
        return
    values = {id(value): value for value in (*graph.inputs, *graph.outputs)}
    for node in graph.all_nodes():
        values.update((id(value), value) for value in node.outputs)
    whole = _totals(graph, names)
    for value in values.values():
        if value.shape is None:
            continue
        spelled = [_format(dim, names, whole) for dim in value.shape]
        if spelled != [_text(dim) for dim in value.shape]:
            value.shape = ir.Shape(spelled)


def _names_of_symbols(graph: ir.Graph, chosen: dict[tuple[str, int], str], sizes: Mapping[str, int]) -> dict[str, str]:
    """What each symbol is called: by the user, or for the part that its axis plays."""
    inputs = {
        value.name: [_text(dim) for dim in value.shape]
        for value in graph.inputs
        if value.name and value.shape is not None
    }
    outputs = {
        value.name: [_text(dim) for dim in value.shape]
        for value in graph.outputs
        if value.name and value.shape is not None
    }
    parts = _parts(inputs, outputs)
    # a name of the user's stands for its part everywhere, also for the mask, where only the tokens were named
    own = {parts[place]: name for place, name in chosen.items() if place in parts}
    names: dict[str, str] = {}
    for place, name in (*chosen.items(), *((place, own.get(part, part)) for place, part in parts.items())):
        shape = inputs.get(place[0], [])
        symbol = shape[place[1]] if place[1] < len(shape) else None
        if not isinstance(symbol, str) or not _SYMBOL.fullmatch(symbol) or symbol in names:
            continue
        shared = [other for other, known in names.items() if known == name]
        if all(sizes.get(other) == sizes.get(symbol) for other in shared):
            names[symbol] = name
    return names


def _parts(inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> dict[tuple[str, int], str]:
    """Input and axis to the part it plays, for the inputs that models of transformers take."""
    has_encoder = any(name.startswith(_ENCODER) for name in inputs) or any(".encoder." in name for name in inputs)
    cached = any(_CACHE.fullmatch(name) for name in inputs)
    own, past = ("decoder_sequence_length", "past_decoder_") if has_encoder else ("sequence_length", "past_")
    total = ("total_decoder_sequence_length" if has_encoder else "total_sequence_length") if cached else own
    read = {"decoder_input_ids": own, "decoder_inputs_embeds": own, "decoder_attention_mask": total}
    if "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs:
        read |= dict.fromkeys(("input_ids", "inputs_embeds", "attention_mask"), "encoder_sequence_length")
        parts_of_cache = [match for match in map(_CACHE.fullmatch, inputs) if match]
        if "input_ids" in inputs and cached and all(match[2] is None for match in parts_of_cache):
            # a cache without sides holds the tokens of `input_ids`, and the mask covers both, as in DiffusionGemma
            past, read["attention_mask"] = "past_encoder_", "total_encoder_sequence_length"
    else:
        read |= {"input_ids": own, "inputs_embeds": own, "position_ids": own, "token_type_ids": own}
        read["attention_mask"] = total
    read |= dict.fromkeys(
        ("encoder_hidden_states", "encoder_outputs.last_hidden_state", "encoder_attention_mask"),
        "encoder_sequence_length",
    )
    parts: dict[tuple[str, int], str] = {}
    for name, shape in inputs.items():
        if name in read and len(shape) in (2, 3):
            parts |= {(name, 0): "batch_size", (name, 1): read[name]}
            if len(shape) == 3:
                parts[name, 2] = "hidden_size"
        found = _CACHE.fullmatch(name)
        if found and len(shape) == 4:
            layer, side, part = found.groups()
            parts[name, 0] = "batch_size"
            if side == "encoder":
                parts[name, 2] = "encoder_sequence_length_out"
                continue
            grown = outputs.get(f"{PRESENT}.{layer}.{side + '.' if side else ''}{part}")
            slides = grown is not None and "Min(" in str(grown[2])
            parts[name, 2] = past + ("window_length" if slides else "sequence_length")
    return _told_apart(parts, inputs)


def _told_apart(parts: dict[tuple[str, int], str], inputs: Mapping[str, Sequence[Any]]) -> dict[tuple[str, int], str]:
    """Windows of several sizes play several parts: layers with another symbol get a number."""
    seen: dict[str, list[Any]] = {}
    named = {}
    for (name, axis), part in parts.items():
        if part.startswith("past_"):
            symbols = seen.setdefault(part, [])
            symbol = inputs[name][axis]
            if symbol not in symbols:
                symbols.append(symbol)
            number = symbols.index(symbol)
            named[name, axis] = f"{part}_{number + 1}" if number and part.endswith("window_length") else part
        else:
            named[name, axis] = part
    return named


def _totals(graph: ir.Graph, names: Mapping[str, str]) -> dict[str, str]:
    """The sum of past and new tokens is the length of the mask, where the mask's length has a name of its own."""
    totals: dict[str, str] = {}
    lengths = {value.name: value.shape for value in graph.inputs if value.shape is not None}
    for mask, tokens in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        for read in (tokens, tokens.replace("input_ids", "inputs_embeds")):
            if read not in lengths or mask not in lengths or len(lengths[mask]) != 2:
                continue
            total, new = (names.get(str(_text(lengths[name][1]))) for name in (mask, read))
            for past in set(names.values()):
                if total and new and past.startswith("past_") and past.endswith("sequence_length"):
                    totals[f"{past} + {new}"] = total
    return totals


def _text(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _format(dim: int | ir.SymbolicDim, names: Mapping[str, str], whole: Mapping[str, str]) -> int | str | None:
    text = _text(dim)
    if not isinstance(text, str):
        return text
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), text)
    # torch orders a sum by its symbols, whose numbers follow the names of the arguments
    text = _SUM.sub(r"\2 + \1", text)
    return whole.get(text, text)
