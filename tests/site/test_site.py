"""The built site: in a browser nothing is wider than the window, and the search finds what people type.

Its index has neither tables nor pages about the inside, and the guide is found first.
"""

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from pathlib import Path

import pytest

import roundpipe_runtime
import yobx_flatten

SITE = Path(__file__).parents[2] / "build" / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(not (SITE / "searchindex.js").exists(), reason="the site is not built: make site")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")

# What users type, who do not know the names yet.
WORDS = [
    "install", "GPU", "multi-GPU", "quantization", "int4", "FAQ", "speed", "benchmark", "dynamic_axes",
    "dynamic_shapes", "LoRA", "fine-tune", "offload", "CUDA", "onnxruntime", "openvino", "executorch", "KV cache",
    "DynamicCache", "StaticCache", "sliding window", "Whisper", "Llama", "beam search", "bfloat16", "checkpoint",
    "resume", "Trainer", "DeepSpeed", "FSDP", "optimum", "dataclass", "pytree", "out of memory", "error",
    "microbatch", "license", "cite", "serve", "Qwen3-VL",
]  # fmt: skip


@contextlib.contextmanager
def served():
    """The address of the site and of the page that measures it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Print nothing: the test reports."""

        def translate_path(self, path):
            if path.partition("?")[0] == "/measure.html":
                return str(Path(__file__).with_name("measure.html"))
            return super().translate_path(path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def measured(tmp_path, **wanted):
    """What the page that measures has found in a browser of its own."""
    with served() as address:
        fragment = urllib.parse.quote(json.dumps(wanted))
        options = [f"--user-data-dir={tmp_path}", "--timeout=120000", "--virtual-time-budget=10000000", "--dump-dom"]
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *options]
        done = subprocess.run(
            [*command, f"{address}/measure.html#{fragment}"], capture_output=True, text=True, check=True, timeout=600
        )
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.slow
@needs_browser
def test_no_page_is_wider_than_the_window(tmp_path):
    """On a phone and on a desk, light and dark; a wide table scrolls in itself, but not on the first page."""
    pages = [str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html")) if "_modules" not in path.parts]
    assert len(pages) > 50
    found = measured(tmp_path, pages=pages, widths=[390, 1400], words=[])
    assert found["overflowing"] == []


@pytest.mark.slow
@needs_browser
def test_the_search_finds_what_people_type(tmp_path):
    """Every public name, and words of tasks."""
    names = [name for package in (yobx_flatten, roundpipe_runtime) for name in package.__all__ if name[0] != "_"]
    found = measured(tmp_path, pages=[], widths=[], words=[*WORDS, *names])
    assert found["notFound"] == []


@pytest.fixture(scope="module")
def index():
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))


def pages_with(index, term, part="terms"):
    found = index[part].get(term, [])
    return {index["docnames"][number] for number in ([found] if isinstance(found, int) else found)}


@pytest.mark.parametrize("term", ["openvino", "kwarg", "staticcach", "bert", "gb", "fail", "call", "decis"])
def test_words_are_found_in_the_guide_and_not_in_tables_or_inside(index, term):
    """A term is indexed as a stem."""
    found = pages_with(index, term)
    assert not {page for page in found if page.startswith("dev/")}
    assert not {page for page in found if page.startswith("rows/")}
    assert not found & {"changelog", "matrix", "cut_matrix", "trainings", "runtimes", "genai", "operators"}
    assert term == "decis" or any(page.startswith("guide/") for page in found)


def ranked(index, query):
    """The pages that a query finds, as the script of Sphinx ranks them: all words, titles before texts."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    # the script leaves out numbers
    words = [language.stem(word.lower()) for word in re.findall(r"\w+", query) if not word.isdigit()]
    scores = {}
    titled = [pages_with(index, word, "titleterms") for word in words]
    for page in set.intersection(*(pages_with(index, word) | pages for word, pages in zip(words, titled, strict=True))):
        scores[page] = sum(15 if page in pages else 5 for pages in titled)
    for title, places in index["alltitles"].items():
        if query.lower() in title.lower() and 2 * len(query) >= len(title):
            for number, section in places:
                page = index["docnames"][number]
                score = round(15 * len(query) / len(title)) + (1 if section is None else 0)
                scores[page] = max(scores.get(page, 0), score)
    return sorted(scores, key=lambda page: -scores[page])


@pytest.mark.parametrize("query", ["openvino", "kwargs", "StaticCache", "BERT", "24 GB", "failing call"])
def test_the_guide_is_found_first(index, query):
    """Pages of the guide have the highest score; objects of the reference are listed by name, apart."""
    found = ranked(index, query)
    best = [page for page in found if page.startswith("guide/")]
    assert best
    assert found[0].startswith("guide/"), found[:5]
