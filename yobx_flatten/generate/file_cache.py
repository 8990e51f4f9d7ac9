"""A ``Cache`` of transformers whose keys and values stay with the library that runs the files. Imports transformers.

.. code-block:: text

    generate of transformers ──> get_seq_length, reorder_cache, crop ──> FileCache ──> TextState.cache
                                                                                       values of the library, not copied
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch
from transformers.cache_utils import Cache, QuantizedCache

from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..huggingface.builders import make_dynamic_cache
from ..huggingface.cache_names import has_read, tokens_in
from ..runners.rewind import cache_tensors, copied, cropped, held_before, rewound
from .pictures import Seen
from .steps import Steps, TextState


class FileCache(Cache):  # type: ignore[misc] # transformers is untyped
    """The cache of exported files for transformers' generation loops, which reorder its rows and remove last tokens."""

    # transformers' loops read these attributes; one entry stands for all layers
    is_compileable, is_croppable = False, True
    is_linear: ClassVar[list[bool]] = [False]
    is_sliding: ClassVar[list[bool]] = [False]

    def __init__(self, steps: Steps) -> None:
        super().__init__(layers=[])
        self.steps = steps
        self.state: TextState | None = None
        self.seen = 0
        # number of last tokens that the files must read again, because `crop` restored the state before their call
        self.again = 0
        self._held: dict[str, Any] | None = None
        self._pictures: list[Seen] = []
        self._held_seen = 0

    @classmethod
    def of(cls, given: Any, steps: Steps) -> FileCache:
        """Turn the caller's empty transformers cache into a cache of the files, in place."""
        made: Any = given
        if isinstance(given, FileCache):
            return given
        known = isinstance(given, Cache) and type(given).__module__.startswith("transformers.")
        if not known or any(isinstance(part, QuantizedCache) for part in (given, *vars(given).values())):
            raise InvalidArgumentError(
                f"The cache is {describe_class(given)}, but exported files keep keys and values in the model's dtype. "
                "Pass DynamicCache(), or no cache."
            )
        if has_read(given):
            raise InvalidArgumentError(
                f"The cache is {describe_class(given)} with {tokens_in(given) or 'some'} tokens from another model. "
                "Pass a cache that a call of this model returned, or no cache."
            )
        vars(given).clear()
        made.__class__ = cls
        made.__init__(steps)
        found: FileCache = made
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache with the same tokens, so that several texts can continue one prompt."""
        made = memo[id(self)] = type(self)(self.steps)
        made.__dict__ |= vars(self)  # only the tensors that a library writes in place need a copy
        if self.state is not None:
            made.state = dataclasses.replace(self.state, cache=copied(self.steps.parts.decoder, self.state.cache))
        return made

    def __copy__(self) -> Self:
        """Return a deep copy, because a cache with a shared state would miss the tokens of the other cache."""
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            "The cache of an exported model cannot be stored: its keys and values are in the memory of the library "
            "that runs them. Store the tokens, and run the model on them again; copy.deepcopy(cache) works within "
            "this process."
        )

    def hold(self) -> None:
        """Save the current state, so that :meth:`crop` can return to it."""
        assert self.state is not None
        self._held, self._held_seen = held_before(self.state.cache), self.seen - self.again
        self._pictures = self.state.seen

    # -- what transformers' loops read --------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache."""
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_length = get_max_cache_shape

    @property
    def is_initialized(self) -> bool:
        """Whether the cache contains a token."""
        return self.state is not None

    def activate_past_recording(self) -> None:
        """Do nothing: the state before a call of several tokens is always saved."""

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self.again, self._held = None, 0, 0, None

    # -- what transformers' loops change ------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select and reorder the rows of the cache."""
        if self.state is not None:
            rows, state = beam_idx.cpu(), self.state
            state.cache = self.steps.parts.decoder.select_rows(state.cache, rows)
            state.repeat(rows)
            self._held = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.state is not None:
            self.reorder_cache(torch.arange(len(self.state.tokens)).repeat_interleave(repeats))

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of the cache; ``-n`` removes the last ``n`` tokens."""
        kept = tokens if tokens > 0 else self.seen + tokens
        state = self.state
        if state is None or kept >= self.seen:
            return
        found = None if self.again else cropped(self.steps.parts.decoder, state.cache, self.seen, kept)
        if found is not None:
            state.cache = found
        elif self._held is not None and kept >= self._held_seen:
            state.cache, state.seen = rewound(state.cache, self._held, self._held_seen), self._pictures
            self.again = kept - self._held_seen
        elif not self.again or kept < self.seen - self.again:
            raise GenerationError(
                f"{self.steps.parts.decoder.name} has a sliding window or a recurrent state: its cache cannot drop "
                f"{self.seen - kept} tokens. Call generate without this cache."
            )
        else:
            self.again -= self.seen - kept
        state.keep(kept)
        self.seen = kept

    # -- what Whisper's loop reads ------------------------------------------------------------------------------------

    @property
    def self_attention_cache(self) -> Any:
        """A copy of the keys and values of the decoder's own tokens."""
        return self._copy("decoder")

    @property
    def cross_attention_cache(self) -> Any:
        """A copy of the keys and values of the encoder's output."""
        return self._copy("encoder")

    def _copy(self, side: str) -> Any:
        found = {} if self.state is None else cache_tensors(self.state.cache)
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, leaf in found.items():
            parts = name.split(".")  # past_key_values.0.decoder.key
            if len(parts) == 4 and parts[2] == side:
                layers.setdefault(int(parts[1]), {})[parts[3]] = leaf
        return make_dynamic_cache([(layers[index]["key"], layers[index]["value"]) for index in sorted(layers)])
