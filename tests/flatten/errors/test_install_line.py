"""The line that installs a missing library takes the package from where it came: it may be on no index."""

import importlib.metadata
import json
import re
import shlex
import types

import pytest

from yobx_flatten import MissingDependencyError
from yobx_flatten.errors import dependencies

require = dependencies.require


def installed(monkeypatch, folder, came):
    monkeypatch.setattr(dependencies, "__file__", str(folder / "site-packages" / "yobx_flatten" / "errors" / "d.py"))
    noted = None if came is None else json.dumps({"url": came, "dir_info": {}})
    found = types.SimpleNamespace(read_text=lambda name: noted)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)


def source_of(extra):
    with pytest.raises(MissingDependencyError) as refused:
        require("no_such_library", purpose="a file", extra=extra)
    *words, source = shlex.split(str(refused.value).splitlines()[-1])
    assert words[:2] == ["pip", "install"]
    found = re.fullmatch(rf"(.*)\[{extra}\]", source)
    return words[2:], found[1]


@pytest.mark.parametrize("name", ["a checkout", "yobx_flatten-0.1.0-py3-none-any.whl"])
def test_it_names_the_checkout_or_the_wheel(name, tmp_path, monkeypatch):
    """pip notes it in direct_url.json; spaces are escaped there."""
    (tmp_path / name).mkdir()
    installed(monkeypatch, tmp_path, (tmp_path / name).as_uri())
    assert source_of("onnx,openvino") == ([], str(tmp_path / name))


@pytest.mark.parametrize("came", [None, "file:///no/such/folder", "https://example.org/a.whl"])
def test_it_names_the_package_where_no_folder_is_known(came, tmp_path, monkeypatch):
    """Of an index, or where the checkout was deleted: pip then reads the extras of the installed package."""
    installed(monkeypatch, tmp_path, came)
    assert source_of("openvino") == ([], "yobx-flatten")


def test_a_package_that_is_read_from_its_checkout_stays_so(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "pyproject.toml").touch()
    installed(monkeypatch, tmp_path, None)
    assert source_of("lora") == (["-e"], str(tmp_path / "site-packages"))


def test_a_package_without_metadata_has_a_line(tmp_path, monkeypatch):
    installed(monkeypatch, tmp_path, None)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert source_of("lora") == ([], "yobx-flatten")
