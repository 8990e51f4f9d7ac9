"""A timeline as a page, in a browser without a window."""

import html
import json
import re
import shutil
import subprocess
import urllib.parse
from pathlib import Path

import pytest

from roundpipe_runtime import Record
from roundpipe_runtime.cli.app import run
from roundpipe_runtime.timeline.drawing import save_page
from roundpipe_runtime.timeline.record import Timeline

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# One run on two devices, 10 ms of optimizer, and the begin of the next run.
RECORDS = [
    Record(0, -1, "a", "upload", 0.000, 0.010, 0),
    Record(0, 0, "a", "forward", 0.010, 0.030, 0),
    Record(1, 0, "b", "forward", 0.030, 0.040, 1),
    Record(1, 0, "b", "backward", 0.042, 0.060, 1),
    Record(1, -1, "b", "download", 0.060, 0.070, 1),
    Record(0, -1, "a", "upload", 0.080, 0.090, 0),
    Record(0, 0, "a", "forward", 0.090, 0.100, 0),
]


def test_a_page_needs_nothing_else(tmp_path):
    """No address in it but those of the standard; text of a record cannot end the script."""
    records = [*RECORDS, Record(2, 0, "</script><b>", "loss", 0.09, 0.1)]
    save_page(records, tmp_path / "run.html", title="<i>")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|src=|@import|url\(", text)
    assert text.count("</script>") == 2
    assert "<b>" not in text
    assert "<i>" not in text


def test_the_command_writes_a_page(tmp_path, capsys):
    """Next to the drawing in the terminal."""
    timeline = Timeline()
    timeline.records = RECORDS
    timeline.save(tmp_path / "run.json")
    assert run(["timeline", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]) == 0
    assert str(tmp_path / "run.html") in capsys.readouterr().out.replace("\n", "")
    assert '"title":"run.json"' in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.slow  # starts a browser, seconds
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_the_page_explains_zooms_and_fits_a_phone(tmp_path):
    """The bar under the pointer, the bubble, twice as near, a quarter further, all again; 390 and 1,400 pixels."""
    page = tmp_path / "run.html"
    save_page(RECORDS, page, title="two devices")
    # the middle of the first lane, which follows the axis and a name: 20, 50 and 75 ms
    wanted = {"page": page.as_uri(), "widths": [390, 1400], "at": [0.2, 0.5, 0.75], "y": 50}
    look = Path(__file__).with_name("look_at_page.html").as_uri()
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"{look}#{urllib.parse.quote(json.dumps(wanted))}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert [one["width"] for one in found] == [390, 1400]
    for one in found:
        assert not one["overflows"]
        assert one["links"] == 0
        assert one["title"] == "two devices"
        assert one["said"] == [
            "forward of stage 0, layer 0, microbatch 0 on a: 20.00 ms, from 10.00 ms",
            "a waits for 40.00 ms, dependency, from 30.00 ms",
            "a waits for 10.00 ms, optimizer, from 70.00 ms",
        ]
        assert one["colours"] > 8
        assert one["whole"] == one["all"] == [0, 100_000]
        assert one["zoomed"] == [25_000, 75_000]
        assert one["moved"] == pytest.approx([37_500, 87_500], abs=50_000 / 350)  # a pixel
        assert [row[0] for row in one["table"]] == ["a", "b"]
        assert one["table"][0][1:] == [
            "30.00 ms 30.0 %",
            "20.00 ms 20.0 %",
            "10.00 ms 10.0 %",
            "40.00 ms 40.0 %",
            "0 0.0 %",
        ]
        assert one["table"][1][5] == "2.000 ms 2.0 %"
        assert "waits: interpreter" in one["legend"]
