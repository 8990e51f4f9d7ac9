"""The README for the index of packages: links into the repository are absolute, or words while it has no address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def readme_of_index(text: str, source: str | None) -> str:
    """Return the README for readers who do not have the repository.

    Args:
        text: the README, with links relative to the root of the repository.
        source: address of the repository; ``None`` while it has none.
    """

    def link(found: re.Match[str]) -> str:
        return f"[{found[1]}]({source}/blob/main/{found[2]})" if source else found[1]

    text = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", link, text)
    picture = re.compile(r'<img src="(?!https?:)([^"]+)"([^>]*)>')
    return picture.sub(rf'<img src="{source}/raw/main/\1"\2>' if source else "", text)


class ReadmeHook(MetadataHookInterface):
    """Put it into the metadata of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the key ``readme``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_of_index(text, source)}
