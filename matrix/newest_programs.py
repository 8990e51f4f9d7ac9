"""Small programs that `newest` runs: the README's, and generation next to the model itself."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["TYPES", "blocks", "generation", "main", "readme"]

ROOT = pathlib.Path(__file__).parent.parent
TYPES = ("llama", "mistral", "gemma3_text", "mixtral", "gpt2", "t5")
"""Full and sliding layers, both, experts, positions that are learned, an encoder."""

NEW = 20  # with the prompt several times the window of a small model


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the Python programs of a page, each with the heading that it stands under."""
    heading = ""
    for found in re.finditer(r"^## ([^\n]*)$|^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if found[1]:
            heading = found[1]
        else:
            yield heading, found[2]


def readme(text: str | None = None) -> int:
    """Run all programs of the README in an empty folder, one after the other, as if they were pasted.

    Args:
        text: another page.

    Returns:
        How many failed.
    """
    text = text if text is not None else (ROOT / "README.md").read_text(encoding="utf-8")
    shared: dict[str, Any] = {"__name__": "__main__"}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        before = pathlib.Path.cwd()
        os.chdir(folder)
        try:
            for heading, source in blocks(text):
                failed += not _passes(heading, lambda source=source: exec(compile(source, "README", "exec"), shared))
        finally:
            os.chdir(before)
    return failed


def generation(names: tuple[str, ...] = TYPES) -> int:
    """Export small models as folders; each generates the tokens that ``model.generate`` does.

    Args:
        names: types of models.

    Returns:
        How many failed.
    """
    return sum(not _passes(name, lambda name=name: _generate(name)) for name in names)


def _generate(name: str) -> None:
    import torch

    from yobx_flatten import export_folder, open_generator
    from yobx_flatten.model_folder.source.configuration import small_model

    model = small_model(name)
    prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, num_beams=1
    )
    with tempfile.TemporaryDirectory(prefix="folder-") as folder:
        export_folder(model, folder, proof="sample")
        found = open_generator(folder).generate(prompt, max_new_tokens=NEW)
    if not torch.equal(found, expected):
        raise ArithmeticError(f"found {found.tolist()}, and model.generate {expected.tolist()}")


def _passes(name: str, program: Callable[[], object]) -> bool:
    try:
        program()
    except Exception as error:  # whatever goes wrong is the result
        traceback.print_exc()
        _say(f"FAIL {name}: {type(error).__name__}: {' '.join(str(error).split())[:250]}")
        return False
    _say(f"ok {name}")
    return True


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(name: str) -> int:
    """Run one of the programs; return 1 if something in it failed."""
    programs: dict[str, Callable[[], int]] = {"readme": readme, "generation": generation}
    return 1 if programs[name]() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
