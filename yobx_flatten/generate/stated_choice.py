"""Read from ``generation_config.json`` how tokens are chosen, and refuse what files cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import GenerationError, InvalidArgumentError
from .beams import BeamSettings
from .sampling import Sampling

__all__ = ["beams_of", "check_known", "sampling_of"]

# what changes the tokens, and is not done here, with the values that mean that it does nothing
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None, []),
    "penalty_alpha": (None, 0, 0.0),
    "prompt_lookup_num_tokens": (None, 0),
    "assistant_early_exit": (None, 0),
    "dola_layers": (None, []),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0, 0.0),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "token_healing": (None, False),
    "max_time": (None,),
}
_UNKNOWN_OF_DRAWS: dict[str, tuple[Any, ...]] = {
    "top_h": (None,),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
}
_TOP_K = 50  # transformers' default, also in a file that does not state it


def check_known(generation: Mapping[str, Any]) -> None:
    """Raise where a configuration asks for what generation from files does not do."""
    looked_at = {**_UNKNOWN, **(_UNKNOWN_OF_DRAWS if generation.get("do_sample") else {})}
    unknown = [name for name, plain in looked_at.items() if generation.get(name) not in plain]
    if unknown:
        raise GenerationError(
            f"generation_config.json asks for {', '.join(unknown)}, which the files here cannot do. Remove the entry, "
            "or call model.generate."
        )


def sampling_of(generation: Mapping[str, Any]) -> Sampling:
    """Return how tokens are drawn, with transformers' defaults; the likeliest are taken where nothing is drawn."""
    if not generation.get("do_sample"):
        return Sampling()
    top_k = generation.get("top_k")
    named = {name: generation.get(name) for name in ("temperature", "top_p", "min_p", "typical_p")}
    given = {name: value for name, value in named.items() if value is not None}
    for name in ("top_p", "typical_p"):
        if given.get(name, 0) >= 1:  # all of them
            del given[name]
    try:
        return Sampling(do_sample=True, top_k=_TOP_K if top_k is None else top_k or None, **given)
    except InvalidArgumentError as error:
        raise GenerationError(f"generation_config.json: {error}") from error


def beams_of(generation: Mapping[str, Any]) -> BeamSettings:
    """Return what a search keeps."""
    names = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    try:
        return BeamSettings(**given)
    except InvalidArgumentError as error:
        raise GenerationError(f"generation_config.json: {error}") from error
