"""Verify files that other exporters wrote: compare the outputs of each file with the outputs of the model."""

from __future__ import annotations

from .verify_file import FileReport, VerifiedFile, verify_file

__all__ = ["FileReport", "VerifiedFile", "verify_file"]
