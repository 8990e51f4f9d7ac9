"""Find the call of a model (such as a prefill) that a file from another exporter implements, and run the file."""

# file                                               leaf of the call
# past_key_values.0.key   (optimum, genai)           past_key_values.0.key
# past_key_values.0.1     (tuples of tuples)         past_key_values.0.value
# present_3               (one flat tuple)           past_key_values.1.value
# past_key_self_0         (genai's Whisper)          past_key_values.0.decoder.key
# cache_key_0             (torch.onnx.export)        past_key_values.0.key
# decoder_input_ids       (transformers)             input_ids of a decoder

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core.private_names.of_torch import pytree
from ..errors import FlattenError, InvalidArgumentError, ReplayError
from ..export.proof.eager_runs import Case, clone
from ..export.proof.replay import ByName, Padding
from ..huggingface.cache_names import CACHE, PRESENT, cache_of, spellings_of
from ..huggingface.cases import DecodeSizes, decode_inputs, default_sizes
from ..model_folder.pieces.tasks import TASKS, pieces_for, task_of
from ..model_folder.pieces.text import Piece, Split, decoder_pieces, encoder_decoder_pieces
from ..registry.recipe.aliases import PyTree, TransformersModel
from ..runners.ports import Port, Runner
from ..trees.walk import leaf_names, match, plain_names, plain_spelling

_FRONT = re.compile(rf"(?:new_|updated_|out_)?(?:{CACHE}?|present_key_values?|past|{PRESENT}|pkv|cache)(?=[\W_\d])")
_KINDS = {"key": "key", "keys": "key", "k": "key", "value": "value", "values": "value", "v": "value"}
_SIDES = {"self": "decoder", "decoder": "decoder", "cross": "encoder", "encoder": "encoder"}

ALIASES: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("decoder_input_ids",),
    "encoder_hidden_states": ("encoder_outputs", "encoder_outputs.last_hidden_state", "encoder_last_hidden_state"),
    "encoder_attention_mask": ("attention_mask",),
    "last_hidden_state": ("hidden_states", "encoder_hidden_states", "token_embeddings"),
    "input_features": ("audio_features",),
    "logits": ("scores", "lm_logits", "prediction_logits"),
}


class Place(NamedTuple):
    layer: int
    side: str  # `"decoder"` or `"encoder"`
    kind: str  # `"key"` or `"value"`


def place_of(name: str, *, flat: int = 2) -> Place | None:
    """Parse the name of a KV cache input or output: layer, decoder or encoder, key or value; ``None`` for other names.

    >>> place_of("past_key_values.3.decoder.key"), place_of("present_2"), place_of("input_ids")
    (Place(layer=3, side='decoder', kind='key'), Place(layer=1, side='decoder', kind='key'), None)
    """
    # flat: the number of tensors per layer in one tuple of all layers: 2, or 4 with the tensors of an encoder
    lowered = name.lower()
    front = _FRONT.match(lowered)
    words = [word for word in re.split(r"[\W_]+", lowered[front.end() if front else 0 :]) if word]
    numbers = [int(word) for word in words if word.isdigit()]
    kind = next((_KINDS[word] for word in words if word in _KINDS), "")
    side = next((_SIDES[word] for word in words if word in _SIDES), "decoder")
    if not numbers or not (front or kind):
        return None
    if kind:
        return Place(numbers[0], side, kind) if len(numbers) == 1 else None
    layer, part = numbers if len(numbers) == 2 else divmod(numbers[0], flat)
    if not front or len(numbers) > 2 or part > 3:
        return None
    return Place(layer, ("decoder", "encoder")[part // 2], ("key", "value")[part % 2])


def matched(
    graph: Sequence[str], names: Sequence[str], plain: Sequence[str], stated: Mapping[str, str], *, by_order: bool
) -> dict[str, str]:
    """Return, for each input or output name of a file, the name of the model's input or output."""
    # names, plain: the names of each leaf in our files, and in torch.export
    # stated: the mapping of the user, by the names in the file; by_order: whether unknown names are matched by order
    by_order |= all(map(str.isdigit, graph))  # a file without names
    found = {name: stated[name] for name in graph if name in stated}
    for name in sorted(set(found.values()) - set(names)):
        known = ", ".join(names)
        raise InvalidArgumentError(f"names, --map: cannot map a name in the file to {name}. Map it to one of: {known}.")
    flat = 4 if any(".encoder." in name for name in names) else 2
    places = {place_of(name): name for name in names}
    for name in graph:
        leaf = places.get(place_of(name, flat=flat)) if name not in found else None
        if leaf is not None and place_of(leaf) is not None and leaf not in found.values():
            found[name] = leaf
    left = [name for name in graph if name not in found]
    free = [(name, also) for name, also in zip(names, plain, strict=True) if name not in found.values()]
    spelled = [(n, *(a for a in ALIASES.get(n, ()) if a not in names), *spellings_of(also), also) for n, also in free]
    for name, number in match(left, spelled).items():
        if by_order or name in spelled[number] or plain_spelling(name) in map(plain_spelling, spelled[number]):
            found[name] = free[number][0]
    if by_order and not found:  # a file without cache outputs returns the other outputs
        others = [name for name in names if not place_of(name)]
        found = dict(zip(graph, names if len(graph) > len(others) else others, strict=False))
    return found


# -- run a file with the arguments of the module: convert names and types, and add inputs ------------------------------

BRANCH = "use_cache_branch"
"""Name of the input of a merged decoder file that selects whether the file reads its cache inputs."""

DERIVED = (
    *(BRANCH, "cache_position", "position_ids", "decoder_position_ids", "token_type_ids", "num_logits_to_keep"),
    *("logits_to_keep", "total_sequence_length", "past_sequence_length", "seqlens_k"),
)
"""Names of inputs of a file that are computed from other inputs if the module has no input of that name."""
WINDOW = "._sliding_window_tensor"
"""The end of the name of an input with the window of a layer, in files of transformers' exporters."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model (such as a prefill) that an exported file may implement, with inputs for a comparison."""

    what: str  # a description for the report
    module: torch.nn.Module
    cases: Sequence[Case]  # the first case is the example
    inputs: Mapping[str, str]  # the name of a leaf in our files, by its name in the file
    leaves: Sequence[str]  # the names of all leaves in our files, in order
    remarks: Sequence[str] = ()

    @property
    def window(self) -> int:
        """The number of tokens in the sliding window of the layers; 0 if the layers attend to all tokens."""
        configs = (getattr(module, "config", None) for module in self.module.modules())
        return next(filter(None, (getattr(config, "sliding_window", None) for config in configs)), 0)

    @property
    def reads_cache(self) -> bool:
        return any(place_of(name) for name in self.leaves)


class FileSide(ByName):
    """Runs a file of another exporter, and compares its outputs with the outputs of the model."""

    def __init__(self, runner: Runner, call: Call, outputs: Mapping[str, str]) -> None:
        super().__init__(runner, call.leaves)
        self._call, self._inputs, self._outputs = call, call.inputs, outputs
        self.ran = False  # whether any case has run
        self.other_types: dict[str, str] = {}  # the float types of outputs for which the model returns a different type

    def compare(
        self, eager: PyTree, outputs: Mapping[str, Any], names: Sequence[str], padding: Padding
    ) -> dict[str, float]:
        leaves = pytree.tree_leaves(eager)
        kept = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if name in outputs]
        if not kept:
            raise ReplayError(
                f"the model has no outputs {', '.join(self._runner.outputs)}: map them to its outputs by names={{...}}"
            )
        found = dict(outputs)
        window = self._call.window - 1  # a prefill may return all tokens, but the next call reads only the window
        for name, leaf in kept:
            value = found[name]
            if not isinstance(value, torch.Tensor) or not isinstance(leaf, torch.Tensor):
                continue
            is_first = not self._call.reads_cache and place_of(name) and leaf.dim() == value.dim() == 4
            if is_first and 0 < window == leaf.shape[2]:
                value = value[:, :, -window:]
            if value.dtype != leaf.dtype and value.is_floating_point() == leaf.is_floating_point():
                if value.is_floating_point():
                    self.other_types[name] = str(value.dtype).removeprefix("torch.")
                value = value.to(leaf.dtype)
            found[name] = value
        return super().compare([leaf for _, leaf in kept], found, [name for name, _ in kept], padding)

    def feed_back(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        lost = [name for name in self._inputs.values() if place_of(name) and ".encoder." not in name]
        lost = [name for name in lost if PRESENT + name.removeprefix(CACHE) not in outputs]
        if lost:
            raise ReplayError(f"the file takes {lost[0]} but does not return it, so the next call has no cache")
        return super().feed_back(kwargs, outputs)

    def _found(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        feeds = {}
        for name, port in self._runner.ports.items():
            leaf = self._inputs.get(port.name)
            if leaf is None and port.name.endswith(WINDOW):
                feeds[name] = torch.full([size or 1 for size in port.shape], self._call.window)
                continue
            value = derived(port, inputs, reads_cache=self._call.reads_cache) if leaf is None else inputs[leaf]
            is_typed = port.dtype is not None and isinstance(value, torch.Tensor)
            feeds[name] = value.to(port.dtype).contiguous() if is_typed else value
        found, self.ran = self._runner.run(feeds), True
        return {self._outputs[name]: value for name, value in found.items() if name in self._outputs}


def derived(port: Port, inputs: Mapping[str, Any], *, reads_cache: bool) -> torch.Tensor:
    """Compute, from the inputs of the model, an input that only the file has, such as position ids."""
    tokens = next(inputs[name] for name in ("input_ids", "decoder_input_ids", "inputs_embeds") if name in inputs)
    rows, new = tokens.shape[:2]
    mask = inputs.get("attention_mask")
    held = [leaf for name, leaf in inputs.items() if place_of(name) and ".encoder." not in name]
    past = mask.shape[1] - new if mask is not None else held[0].shape[2] if held else 0
    if port.name == BRANCH:
        return torch.full((1,) if port.shape else (), reads_cache)
    if port.name.endswith("position_ids"):
        counted = torch.arange(past + new).expand(rows, -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        return counted[:, past:]
    known = {"cache_position": torch.arange(past, past + new), "token_type_ids": torch.zeros(rows, new)}
    known |= {"total_sequence_length": torch.tensor(past + new), "past_sequence_length": torch.tensor(past)}
    known |= {"seqlens_k": torch.full((rows,), past + new - 1) if mask is None else mask.sum(1) - 1}
    if port.name in known:
        value = known[port.name]
        return value.reshape([size or -1 for size in port.shape]) if value.numel() == 1 else value
    if port.shape in ((), (1,)):  # the number of last tokens with logits; 0 stands for all tokens
        return torch.zeros(port.shape)
    # only the other branch of a merged decoder reads this input
    source = next((leaf.shape[1] for name, leaf in inputs.items() if name == "encoder_attention_mask"), 1)
    axes = [rows, *([source] if not place_of(port.name) else [])]
    return torch.zeros([size or (axes[axis] if axis < len(axes) else 1) for axis, size in enumerate(port.shape)])


# -- find the call ---------------------------------------------------------------------------------------------------

_COUNTED = {"position_ids": "those that the mask counts", "attention_mask": "one of ones"}
"""By name of an input that the module needs and the file lacks: a description of the input that the module gets."""


def calls_of(model: torch.nn.Module, runner: Runner, stated: Mapping[str, str]) -> Iterator[Call]:
    """Yield the calls of a model that a file may implement, beginning with the most likely call."""
    for what, module, cases in _possible(model, runner):
        # the arguments that the file lacks: those that `module` does not need, and those that the file may compute
        takes, example = inspect.signature(module.forward).parameters, cases[0].kwargs
        read = {name for name in example if {name, *ALIASES.get(name, ())} & set(runner.ports)}
        masks = ("encoder_attention_mask", "decoder_attention_mask")
        unread = [name for name in ("attention_mask", "position_ids", "token_type_ids", *masks) if name in example]
        unread = [name for name in unread if name not in read]
        free = [name for name in unread if takes[name].default is not inspect.Parameter.empty]
        rest = [name for name in unread if name not in free]
        ways = [(free, rest)] if set(rest) <= set(_COUNTED) else []
        if "position_ids" in free:
            ways.append(([name for name in free if name != "position_ids"], [*rest, "position_ids"]))
        for left, counted in ways:
            given = []
            for case in cases:
                kwargs = {name: leaf for name, leaf in case.kwargs.items() if name not in left}
                # a mask that the module requires
                kwargs |= {name: torch.ones_like(kwargs[name]) for name in counted if name.endswith("mask")}
                given.append(dataclasses.replace(case, kwargs=kwargs))
            call = fitting(what, module, given, runner, stated, counted)
            if call is not None:
                notes = [f"the file takes no {', '.join(left)}: the model is called without it."] if left else []
                notes += [f"the file takes no {name}: the model gets {_COUNTED[name]}." for name in counted]
                yield dataclasses.replace(call, remarks=(*call.remarks, *notes))


def fitting(
    what: str,
    module: torch.nn.Module,
    cases: Sequence[Case],
    runner: Runner,
    stated: Mapping[str, str],
    counted: Sequence[str] = (),
) -> Call | None:
    """Return a call with test cases that a file accepts, or ``None`` if the file has other inputs than the call."""
    # counted: inputs that the file computes from other inputs
    inputs = _arguments(module, cases[0])
    names, given = leaf_names(inputs), pytree.tree_leaves(inputs)
    found = matched(list(runner.ports), names, plain_names(inputs), stated, by_order=False)
    lacking = [name for name in runner.ports if name not in found and name not in DERIVED and not name.endswith(WINDOW)]
    if BRANCH in runner.ports:  # only the other branch reads these inputs
        lacking = [name for name in lacking if not place_of(name) and name != "encoder_hidden_states"]
    unread = [n for n, leaf in zip(names, given, strict=True) if isinstance(leaf, torch.Tensor)]
    if "encoder_hidden_states" in found.values():  # the file computes the encoder's keys and values
        unread = [name for name in unread if ".encoder." not in name]
    if lacking or set(unread) - set(found.values()) - set(counted):
        return None
    # the axis sizes that the file fixes and that differ between test cases, by input name
    arguments = [_arguments(module, case) for case in cases]
    taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for leaves in map(pytree.tree_leaves, arguments):
        for name, leaf in zip(names, leaves, strict=False):
            for axis, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
                taken[name, axis].add(size)
    sizes: dict[str, dict[int, int]] = {}
    for port in runner.ports.values():
        name = found.get(port.name, "")
        sizes[name] = {at: n for at, n in enumerate(port.shape) if n is not None and len(taken[name, at]) > 1}
    sizes = {name: fixed for name, fixed in sizes.items() if fixed}
    fitted = list(cases)
    for number, case in enumerate(cases) if sizes else ():  # truncate or repeat the tensors
        leaves, spec = pytree.tree_flatten(clone(arguments[number]))
        made = []
        for name, leaf in zip(names, leaves, strict=True):
            for axis, size in sizes.get(name, {}).items():
                if leaf.shape[axis] not in (size, 0):
                    leaf = leaf.index_select(axis, torch.arange(size) % leaf.shape[axis]).contiguous()
            made.append(leaf)
        fitted[number] = dataclasses.replace(case, args=(), kwargs=pytree.tree_unflatten(made, spec))
    if any(place_of(name) for name in sizes):  # the returned cache has a different size, so there is no second call
        fitted = [dataclasses.replace(case, steps=1) for case in fitted]
    remarks = [f"the file fixes axis {axis} of {n} at {size}" for n, of in sizes.items() for axis, size in of.items()]
    return Call(what, module, fitted, found, names, remarks)


def _arguments(module: torch.nn.Module, case: Case) -> dict[str, Any]:
    named = inspect.signature(module.forward).bind_partial(*case.args).arguments if case.args else {}
    return {**named, **case.kwargs}


# -- the calls that exporters write ------------------------------------------------------------------------------------


def _possible(model: TransformersModel, runner: Runner) -> Iterator[tuple[str, torch.nn.Module, list[Case]]]:
    task = task_of(model)
    caches = any(place_of(name) for name in runner.ports)
    if TASKS[task] is decoder_pieces:
        if caches:
            for whole in (False, True):
                for piece in _tried(decoder_pieces, model, Split(whole_cache=whole)):
                    yield "with a cache", piece.module, [*_cases_of(piece, 3), *_empty_cache(piece)]
        if not caches or BRANCH in runner.ports:
            takes = inspect.signature(model.forward).parameters
            like = dict.fromkeys(name for name in ("input_ids", "attention_mask", "position_ids") if name in takes)
            texts: list[Case] = []  # of as many tokens as the test cases with a cache
            for seed, sizes in enumerate((DecodeSizes(), *default_sizes(model)[0])):
                name = sizes.without_cache if texts else "the example"
                texts.append(Case(name, (), decode_inputs(model, sizes, like, seed)))
            yield "without a cache", model, texts
        return
    if TASKS[task] is encoder_decoder_pieces:
        pieces = _tried(encoder_decoder_pieces, model)
        for piece in pieces:
            yield piece.stem, piece.module, _cases_of(piece, 3)
        if pieces:
            encoder, first, following = (_cases_of(piece, 1) for piece in pieces)
            both = _with(encoder, first, "input_ids", "decoder_input_ids")
            yield "encoder and decoder in one call", model, both
            both = _with(following, first, "encoder_hidden_states", "encoder_hidden_states")
            yield f"{pieces[2].stem}, given the features too", pieces[2].module, both
        return
    for piece in _tried(pieces_for, model, task):
        cases = _cases_of(piece, 1)
        yield piece.stem, piece.module, cases
        takes = inspect.signature(piece.module.forward).parameters
        if "token_type_ids" in takes and "input_ids" in piece.kwargs and "token_type_ids" not in piece.kwargs:
            zeros = [dataclasses.replace(c, kwargs={"types": torch.zeros_like(c.kwargs["input_ids"])}) for c in cases]
            yield piece.stem, piece.module, _with(cases, zeros, "types", "token_type_ids")


def _tried(make: Any, *args: Any) -> list[Piece]:
    try:
        found = make(*args)
    except (FlattenError, TypeError, AttributeError, LookupError, ValueError, RuntimeError, ArithmeticError):
        return []
    return list(found[1] if isinstance(found, tuple) else found)


def _cases_of(piece: Piece, steps: int) -> list[Case]:
    return [Case("the example", (), piece.kwargs, steps), *piece.cases]


def _empty_cache(piece: Piece) -> list[Case]:
    layers = getattr(cache_of(piece.kwargs), "layers", None)
    if layers is None or any(type(layer).__name__ != "DynamicLayer" or layer.keys.dim() != 4 for layer in layers):
        return []
    new = piece.kwargs["input_ids"].shape[1]
    given = clone(dict(piece.kwargs))
    for layer in cache_of(given).layers:
        layer.keys, layer.values = layer.keys[:, :, :0].contiguous(), layer.values[:, :, :0].contiguous()
    mask = given.get("attention_mask")
    if mask is not None:
        given["attention_mask"] = mask[:, -new:].contiguous()
    if given.get("position_ids") is not None:
        given["position_ids"] = torch.arange(new).expand(len(given["input_ids"]), -1).contiguous()
    return [Case(f"empty cache, new {new}", (), given, 3)]


def _with(cases: Sequence[Case], others: Sequence[Case], reads: str, name: str) -> list[Case]:
    """Return test cases with an additional argument, whose values are taken from the test cases in ``others``."""
    pairs = zip(cases, others, strict=True)
    return [dataclasses.replace(one, kwargs={**one.kwargs, name: other.kwargs[reads]}) for one, other in pairs]
