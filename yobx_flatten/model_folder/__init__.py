"""A model as a folder of exported files, with its configuration, its tokenizer, and cases that prove it."""

from __future__ import annotations

from .manifest import FolderManifest
from .verify import FolderCheck, FolderReport, verify_folder
from .write import ExportedFolder, export_folder

__all__ = [
    "ExportedFolder",
    "FolderCheck",
    "FolderManifest",
    "FolderReport",
    "export_folder",
    "verify_folder",
]
