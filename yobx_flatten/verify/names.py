"""Match the inputs and outputs of a file with the leaves of a call, by the naming conventions of exporters.

.. code-block:: text

    file                                               leaf of the call
    past_key_values.0.key   (optimum, genai)           past_key_values.0.key
    past_key_values.0.1     (tuples of tuples)         past_key_values.0.value
    present_3               (one flat tuple)           past_key_values.1.value
    past_key_self_0         (genai's Whisper)          past_key_values.0.decoder.key
    cache_key_0             (torch.onnx.export)        past_key_values.0.key
    decoder_input_ids       (transformers)             input_ids of a decoder
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import InvalidArgumentError
from ..huggingface.cache_names import CACHE, PRESENT, spellings_of
from ..trees.walk import match, plain_spelling

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
    """The layer, side (encoder or decoder) and kind (key or value) of one tensor of a KV cache."""

    layer: int
    side: str  # `"decoder"` or `"encoder"`
    kind: str  # `"key"` or `"value"`


def place_of(name: str, *, flat: int = 2) -> Place | None:
    """Return which tensor of a KV cache has the name of an input or output; ``None`` for other names.

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
    """Return the name of the model's input or output that each input or output name of a file stands for."""
    # names, plain: the names of each leaf in our files, and in torch.export
    # stated: the mapping of the user, by the names in the file
    # by_order: whether names that are not known are matched by order
    by_order |= all(map(str.isdigit, graph))  # a file without names
    found = {name: stated[name] for name in graph if name in stated}
    for name in sorted(set(found.values()) - set(names)):
        raise InvalidArgumentError(f"A name is mapped to {name}, not to one of {', '.join(names)}.")
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
