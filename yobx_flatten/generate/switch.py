"""Handle a text that passes the length from which a model changes its rotary angles."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from ..errors import GenerationError
from ..files.document import read_document
from ..huggingface.position_switch import switch_of
from .layout import MANIFEST

__all__ = ["Switch", "read_switch"]


@dataclasses.dataclass(frozen=True)
class Switch:
    """A length, and what the model does there."""

    length: int  # number of tokens, see `.position_switch.switch_of`
    # whether `model.generate` drops its cache there and reads all tokens again, as Phi-3 does; `None` where that is not
    # known
    rereads: bool | None = None

    def passed_at(self, length: int) -> bool:
        """Return whether a loop has to read all tokens again before it goes on."""
        if length != self.length + 1 or self.rereads is False:
            return False
        if self.rereads is None:
            raise GenerationError(
                f"This text grew past {self.length} tokens, where the positions of the model get other angles "
                "(longrope, dynamic), and nothing states whether the model reads its text again there, as Phi-3 does: "
                "other tokens could follow. yobx_flatten.json of an exported folder states it; write the folder with\n"
                "    export_folder(model, folder)\n"
                f"or begin with a prompt of more than {self.length} tokens, or ask for fewer new ones."
            )
        return True


@dataclasses.dataclass(frozen=True)
class _Stated:
    rereads_at_switch: bool | None = None


def read_switch(folder: pathlib.Path, config: Mapping[str, Any]) -> Switch | None:
    """Return where the positions of a model change, and what its folder states of that; ``None`` where they do not."""
    length, path = switch_of(config), folder / MANIFEST
    if length is None:
        return None
    stated = read_document(path, _Stated, failure=GenerationError) if path.is_file() else _Stated()
    return Switch(length, stated.rereads_at_switch)
