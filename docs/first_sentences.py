"""Print the first sentences of ten pages and ten files at random, to be read as a newcomer reads them.

Run it with ``python docs/first_sentences.py``, or with the seed of an earlier run as its argument.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNT = 10


def of_page(path: Path) -> str:
    """Return the first sentence of a page below its title."""
    text = re.sub(r"\A(---\n.*?\n---\n)?", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if not part.startswith(("#", "```", "(", "|"))]
    return first(paragraphs[0]) if paragraphs else "(it includes another page)"


def of_file(path: Path) -> str:
    """Return the first sentence of a module."""
    return first(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "(none)")


def first(text: str) -> str:
    """Return the first sentence of a text, in one line."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0]


def main() -> None:
    """Print what is drawn, and the seed that draws the same again."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(10_000)
    draw = random.Random(seed)
    pages = sorted((ROOT / "docs").rglob("*.md"))
    files = sorted(path for package in ("yobx_flatten", "roundpipe_runtime") for path in (ROOT / package).rglob("*.py"))
    drawn = [(path, of_page(path)) for path in draw.sample(pages, COUNT)]
    drawn += [(path, of_file(path)) for path in draw.sample(files, COUNT)]
    for path, sentence in drawn:
        print(f"{path.relative_to(ROOT)}\n    {sentence}")
    print(f"seed {seed}")


if __name__ == "__main__":
    main()
