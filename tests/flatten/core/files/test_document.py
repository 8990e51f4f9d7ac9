"""JSON, tensors, patterns and templates of a stranger: read with limits, or one error that names the file."""

import dataclasses
import importlib
import importlib.util
import math
import os
import re
import threading
from typing import Any

import pytest
import torch
import transformers

from tests import fresh_process
from yobx_flatten.core.files.document import (
    damage_as,
    inside,
    open_regular,
    opened_tensors,
    parse_document,
    read_configuration,
    read_document,
    read_onnx,
    read_tensors,
    read_text,
    write_tensor_file,
)
from yobx_flatten.core.files.limited import Limited, LimitError, limited
from yobx_flatten.errors import DamagedFileError, InvalidArgumentError, NotRegisteredError
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
    # Mamba 2 has `"time_step_limit": [0.0, Infinity]`; a user's text can hold half of a pair
    assert parse('{"a": [0.0, Infinity]}', dict[str, Any], finite=False) == {"a": [0.0, float("inf")]}
    assert parse('{"a": "\\ud800"}', dict[str, Any]) == {"a": "\ud800"}


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
        "../x", "a/../../x", "/etc/passwd", "", ".", "..", "a\\..\\..\\x", "C:\\x", "C:x", "x\0y", 5, None, ["x"],
        "not there",
    ],
)  # fmt: skip
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


def test_a_text_is_read_by_its_encoding_and_up_to_its_size(tmp_path):
    (tmp_path / "text").write_bytes("è\u2028x".encode())
    assert read_text(tmp_path / "text", failure=DamagedFileError) == "è\u2028x"
    with pytest.raises(DamagedFileError, match="the limit for such files is"):
        read_text(tmp_path / "text", failure=DamagedFileError, most=4)
    (tmp_path / "text").write_bytes("è".encode("latin-1"))
    with pytest.raises(DamagedFileError, match="is not a text in UTF-8"):
        read_text(tmp_path / "text", failure=DamagedFileError)


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("no"), RecursionError("deep"), ValueError()])
def test_damage_is_one_error_and_what_is_no_damage_comes_out_as_it_is(error):
    message = f"the file is damaged \\({type(error).__name__}: "
    with pytest.raises(DamagedFileError, match=message), damage_as(DamagedFileError, "the file"):
        raise error
    for other in (NotRegisteredError("register it"), FileNotFoundError("x"), MemoryError("small"), type(error)("own")):
        with pytest.raises(type(other)), damage_as(DamagedFileError, "the file", type(error)):
            raise other


def names_of(path, *, failure):
    with opened_tensors(path, failure=failure) as file:
        return file.keys()


def read_form(path, *, failure):
    return read_document(path, Form, failure=failure)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("read", [read_form, read_text, open_regular, read_tensors, names_of, read_onnx])
def test_what_has_no_end_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            read(tmp_path / name, failure=DamagedFileError)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing", failure=DamagedFileError)
    if read is read_form:
        with open(tmp_path / "large", "wb") as file:
            file.truncate(2**40)
        with pytest.raises(DamagedFileError, match="the limit for such files is"):
            read(tmp_path / "large", failure=DamagedFileError)


@pytest.mark.parametrize("read", [read_tensors, names_of])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"GGUF\x03\0\0\0\x02\0\0\0", "is not a safetensors file"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\0\0", "is not a safetensors file"),
        (b"", "is damaged"),
        (b"\x08", "is damaged"),
        (b"\xff" * 8 + b"{}", "is damaged"),
    ],
)
def test_only_the_rest_of_a_file_is_damaged(read, content, found, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"x {found}"):
        read(tmp_path / "x", failure=DamagedFileError)


def test_a_tensor_that_is_not_in_the_file_is_named(tmp_path):
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2).bfloat16()}
    write_tensor_file(tmp_path / "x", tensors)
    torch.testing.assert_close(read_tensors(tmp_path / "x", failure=DamagedFileError), tensors, rtol=0, atol=0)
    with (
        pytest.raises(DamagedFileError, match=r"x is damaged .*File does not contain tensor c"),
        opened_tensors(tmp_path / "x", failure=DamagedFileError) as file,
    ):
        file.get_tensor("c")


FULL = """
import resource, sys, torch
from yobx_flatten import export_program

path, room = sys.argv[1], int(sys.argv[2])
exported = export_program(torch.nn.Linear(64, 64), (torch.zeros(4, 64),), cases=[], proof="none")
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
try:
    exported.save(path)
except OSError as error:
    print("refused", error.strerror)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the limit of a process")
@pytest.mark.parametrize("room", [100, 3000, 17_000], ids=["the first entry", "a weight", "the end"])
def test_a_program_that_does_not_fit_leaves_the_old_file(tmp_path, room):
    """torch's writer ends the process where its destructor cannot write the end of the archive."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    done = fresh_process.run("-c", FULL, path, str(room))
    assert done.stdout == "refused File too large\n"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")


@needs_fork
def test_results_and_errors_are_those_of_the_function():
    """JAX warns of each fork, for its own threads: a template uses none of them, and the fork is silent."""
    if importlib.util.find_spec("jax"):
        importlib.import_module("jax").numpy.zeros(1).block_until_ready()
    assert limited(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError, match="by zero"):
        limited(lambda: 1 // 0)
    with pytest.raises(InvalidArgumentError, match="of ours"):
        limited(_raise, InvalidArgumentError("of ours"))
    with pytest.raises(RuntimeError, match="UncopyableError: 1 and 2"):
        limited(lambda: _raise(UncopyableError(1, 2)))


def _raise(error):
    raise error


class UncopyableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@needs_fork
@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (re.fullmatch, ["([a-z]+)+!", "a" * 60], "CPU seconds"),
        (lambda: [None for _ in iter(int, 1)], [], "CPU seconds|of memory"),
        (lambda: format(1, "9999999999d"), [], "of memory"),
        (lambda: "x" * 10**8, [], "the call returned 100 MB"),
        (lambda: os._exit(0), [], "CPU seconds"),
    ],
    ids=["a pattern", "a list without an end", "a wide number", "a long text", "an end"],
)
def test_what_takes_too_much_is_one_error_and_the_next_call_is_answered(function, given, message):
    calls = Limited(lambda is_good: 5 if is_good else function(*given))
    assert calls(True) == 5
    with pytest.raises(LimitError, match=message):
        calls(False)
    assert calls(True) == 5


@needs_fork
def test_threads_are_given_their_own_answers():
    calls, found = Limited(lambda number: number * number), {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: [calls(n) for _ in range(20)]})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [n * n] * 20 for n in range(4)}


@needs_fork
def test_the_process_ends_with_the_object_and_has_no_file_of_the_caller(tmp_path):
    """A file that it kept open would stay locked."""
    with open(tmp_path / "file", "wb") as file:
        number = file.fileno()
        calls = Limited(lambda: (os.getpid(), _is_open(number)))
        process, is_open = calls()
    assert process != os.getpid()
    assert not is_open
    assert calls()[0] == process
    del calls
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
