"""JSON of a stranger: of the stated form, or one error of ours that names the file."""

import dataclasses
import math
import os
from typing import Any

import pytest
import transformers

from yobx_flatten.errors import DamagedFileError, NotRegisteredError
from yobx_flatten.files.document import (
    check_regular,
    damage_as,
    inside,
    open_regular,
    parse_document,
    read_configuration,
    read_document,
    read_text,
)
from yobx_flatten.generate.stand_ins import config_from


@dataclasses.dataclass
class Form:
    rate: float
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def parse(text, form=Form, **options):
    return parse_document(text, form, "a file", failure=DamagedFileError, **options)


def test_a_document_of_the_form_is_read():
    assert parse('{"rate": 1, "files": {"a": ["b"]}, "of another version": 0}') == Form(1.0, {"a": ["b"]})
    assert parse(b'{"rate": 0.5}') == Form(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `rate`"),
        ('{"rate": "1"}', r"Expected `float`, got `str` - at `\$\.rate`"),
        ('{"rate": Infinity}', "Infinity is not a finite number"),
        ('{"rate": NaN}', "NaN is not a finite number"),
        ('{"rate": 1e999}', "1e999 is not a finite number"),
        ('{"rate": ' + "9" * 400 + "}", "out of range"),
        ('{"rate": ' + "9" * 5000 + "}", "not JSON"),
        ('{"rate": 1, "files": {"a": [5]}}', "Expected `str`, got `int`"),
    ],
)
def test_anything_else_is_one_error(text, message):
    with pytest.raises(DamagedFileError, match=f"a file is damaged: .*{message}"):
        parse(text)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"GGUF\x03\x00\x00\x00", "Some text.", b"\x80\x04}q\x00.", "- a: 1"])
def test_what_never_was_a_document_is_not_damaged(text):
    with pytest.raises(DamagedFileError, match=r"^a file is not a JSON file: it begins with .*\. Give another\.$"):
        parse(text, remedy="Give another.")


def test_what_transformers_writes_may_be_infinite_and_a_text_may_be_half_a_character():
    """Mamba 2 has `"time_step_limit": [0.0, Infinity]`; a user's text can hold half of a pair."""
    assert parse('{"a": [0.0, Infinity]}', dict[str, Any], finite=False) == {"a": [0.0, float("inf")]}
    assert parse('{"a": "\\ud800"}', dict[str, Any]) == {"a": "\ud800"}


def test_a_configuration_is_read_as_transformers_reads_it(tmp_path):
    file = tmp_path / "config.json"
    tagged = '{"__float__": "%s"}'
    file.write_text(
        f'{{"a": [0.0, Infinity, -Infinity], "b": {{"c": {tagged % "Infinity"}, "d": [{tagged % "-Infinity"}]}}, '
        f'"e": {tagged % "NaN"}, "f": {tagged % "one"}, "g": {{"__float__": "NaN", "h": 1}}, "i": {{"__float__": 3}}}}'
    )
    found = read_configuration(file, dict[str, Any], failure=DamagedFileError)
    assert math.isnan(found.pop("e"))
    assert found == {
        "a": [0.0, math.inf, -math.inf],
        "b": {"c": math.inf, "d": [-math.inf]},
        "f": {"__float__": "one"},
        "g": {"__float__": "NaN", "h": 1},
        "i": {"__float__": 3},
    }
    # to change an entry and write the others again, they are left as they are
    assert read_document(file, dict[str, Any], failure=DamagedFileError, finite=False)["f"] == {"__float__": "one"}


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h"])
def test_the_configuration_of_a_class_comes_back(name, tmp_path):
    config = transformers.AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    stated = read_configuration(tmp_path / "config.json", dict[str, Any], failure=DamagedFileError)
    found = config_from(stated, encoder=False)
    assert type(found) is type(config)
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    expected.name_or_path = ""
    assert found.to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        "a\\..\\..\\x",
        "C:\\x",
        "C:x",
        "x\0y",
        5,
        None,
        ["x"],
        "not there",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(name, tmp_path):
    (tmp_path / "x").write_text("outside", encoding="utf-8")
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    with pytest.raises(DamagedFileError):
        inside(folder, name, DamagedFileError)


def test_a_file_in_the_folder_is_found_also_by_a_link_to_one(tmp_path):
    """The caches of hubs are made of links."""
    (tmp_path / "blob").write_text("x", encoding="utf-8")
    (tmp_path / "folder" / "cases").mkdir(parents=True)
    link = tmp_path / "folder" / "cases" / "one"
    link.symlink_to(tmp_path / "blob")
    assert inside(tmp_path / "folder", "cases/one", DamagedFileError) == link


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_has_no_end_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            read_document(tmp_path / name, Form, failure=DamagedFileError)
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            read_text(tmp_path / name, failure=DamagedFileError)
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            open_regular(tmp_path / name, failure=DamagedFileError)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedFileError, match="the limit for such files is"):
        read_document(tmp_path / "large", Form, failure=DamagedFileError)
    with pytest.raises(FileNotFoundError):
        check_regular(tmp_path / "missing", DamagedFileError)


def test_a_text_is_read_by_its_encoding_and_up_to_its_size(tmp_path):
    (tmp_path / "text").write_bytes("è\u2028x".encode())
    assert read_text(tmp_path / "text", failure=DamagedFileError) == "è\u2028x"
    with pytest.raises(DamagedFileError, match="the limit for such files is"):
        read_text(tmp_path / "text", failure=DamagedFileError, most=4)
    (tmp_path / "text").write_bytes("è".encode("latin-1"))
    with pytest.raises(DamagedFileError, match="is not a text in UTF-8"):
        read_text(tmp_path / "text", failure=DamagedFileError)


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("no"), RecursionError("deep"), ValueError()])
def test_damage_is_one_error(error):
    message = f"the file is damaged \\({type(error).__name__}: "
    with pytest.raises(DamagedFileError, match=message), damage_as(DamagedFileError, "the file"):
        raise error


@pytest.mark.parametrize(
    "error", [NotRegisteredError("register it"), FileNotFoundError("x"), MemoryError("small"), ZeroDivisionError("own")]
)
def test_what_is_no_damage_comes_out_as_it_is(error):
    with pytest.raises(type(error)), damage_as(DamagedFileError, "the file", ZeroDivisionError):
        raise error
