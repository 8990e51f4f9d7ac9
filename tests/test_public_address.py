"""What follows from the public addresses of the project, set and not set."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_of_the_index_has_links_to_the_repository_or_words_without_an_address(monkeypatch):
    hook = type(sys)("hatchling.metadata.plugin.interface")
    hook.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, hook.__name__, hook)
    readme_of_index = loaded(ROOT / "hatch_build.py").readme_of_index
    text = readme_of_index(README, "https://example.org/flatten")
    assert re.findall(r"\]\((?!https?:)[^)]+\)", text) == []
    paths = re.findall(r"https://example.org/flatten/(?:blob|raw)/main/([^)\"#]+)", text)
    assert {"docs/guide/install.md", "docs/_static/overview_export.svg"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    text = readme_of_index(README, None)
    assert "<img" not in text
    assert "[FAQ]" not in text
    assert re.findall(r"\]\((?!https?:)[^)]+\)", text) == []
    assert text.count("](https://") == README.count("](https://")


def test_a_shared_page_names_its_picture_and_404_where_its_files_are():
    address = loaded(ROOT / "docs" / "public_address.py")
    tags = address.head_tags("https://example.org/", "guide/export", 'A "page"', "What it is")
    shown = dict(re.findall(r'<meta property="([^"]+)" content="([^"]*)">', tags))
    assert shown["og:url"] == "https://example.org/guide/export.html"
    assert shown["og:title"] == "A &quot;page&quot;"
    picture = shown["og:image"].removeprefix("https://example.org/")
    assert (ROOT / "docs" / picture).is_file()
    assert address.head_tags("https://example.org/", "404", "", "") == '<base href="https://example.org/">'
