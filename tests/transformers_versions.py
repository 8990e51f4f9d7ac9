"""Conditions of tests on the version of transformers, each with what older versions have not."""

import importlib.metadata

import pytest
from packaging.version import Version


def is_older_than(version: str) -> bool:
    """Whether transformers is installed in an older version."""
    return Version(importlib.metadata.version("transformers")) < Version(version)


def needs_transformers(version: str, before: str) -> pytest.MarkDecorator:
    """Skip with versions before the first one with which the test passes, with what is so in these."""
    return pytest.mark.skipif(is_older_than(version), reason=f"transformers before {version}: {before}")
