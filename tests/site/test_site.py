"""The site in a browser: nothing is wider than the window, and the search finds what people type."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built: make site"),
]

# What users type, who do not know the names yet.
WORDS = [
    "install",
    "GPU",
    "multi-GPU",
    "quantization",
    "int4",
    "FAQ",
    "speed",
    "benchmark",
    "dynamic_axes",
    "dynamic_shapes",
    "LoRA",
    "fine-tune",
    "offload",
    "CUDA",
    "onnxruntime",
    "openvino",
    "executorch",
    "KV cache",
    "DynamicCache",
    "StaticCache",
    "sliding window",
    "Whisper",
    "Llama",
    "beam search",
    "bfloat16",
    "checkpoint",
    "resume",
    "Trainer",
    "DeepSpeed",
    "FSDP",
    "optimum",
    "dataclass",
    "pytree",
    "out of memory",
    "error",
    "microbatch",
    "license",
    "cite",
    "serve",
    "Qwen3-VL",
]


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
        done = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path}",
                "--timeout=120000",
                "--virtual-time-budget=10000000",
                "--dump-dom",
                f"{address}/measure.html#{fragment}",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


def test_no_page_is_wider_than_the_window(tmp_path):
    """On a phone and on a desk, light and dark; a wide table scrolls in itself, but not on the first page."""
    pages = [str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html")) if "_modules" not in path.parts]
    assert len(pages) > 50
    found = measured(tmp_path, pages=pages, widths=[390, 1400], words=[])
    assert found["overflowing"] == []


def test_the_search_finds_what_people_type(tmp_path):
    """Every public name, and words of tasks."""
    names = [name for package in (yobx_flatten, roundpipe_runtime) for name in package.__all__ if name[0] != "_"]
    found = measured(tmp_path, pages=[], widths=[], words=[*WORDS, *names])
    assert found["notFound"] == []
