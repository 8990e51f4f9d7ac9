"""The words of transformers for a model's cache stand in one module; anything else has them in the names of files."""

import pathlib
import re

import pytest

import roundpipe_runtime
import yobx_flatten

HOME = "yobx_flatten/huggingface/cache_names.py"
# past_key_values.0.key, past_key_values.length and past_key_values.* are inputs of files
WORD = re.compile(r"(?:past_key_values|cache_params)(?!\.(?:\d|length\b|\*|N\b))")


def lines_with_a_word(source):
    return [number for number, line in enumerate(source.splitlines(), 1) if WORD.search(line)]


@pytest.mark.parametrize("package", [yobx_flatten, roundpipe_runtime], ids=lambda package: package.__name__)
def test_the_words_stand_in_one_module(package):
    """A release that renames the cache again changes that module, and no other."""
    root = pathlib.Path(package.__file__).parent
    found = [
        f"{path.relative_to(root.parent).as_posix()}:{line}"
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root.parent).as_posix() != HOME
        for line in lines_with_a_word(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_the_rule_tells_names_of_files_from_names_of_arguments():
    source = 'f"{name}.past_key_values"\npast_key_values=cache\n"past_key_values.0.key"\ncache_params.layers\n'
    assert lines_with_a_word(source) == [1, 2, 4]
