"""A model as a folder of exported files, with its configuration, its tokenizer, and cases that prove it."""

from __future__ import annotations

from .manifest import FolderManifest
from .opened import open_generator
from .verify import FolderCheck, FolderReport, verify_folder
from .write import ExportedFolder, export_folder

__all__ = [
    "ExportedFolder",
    "FolderCheck",
    "FolderManifest",
    "FolderReport",
    "export_folder",
    "open_generator",
    "verify_folder",
]
