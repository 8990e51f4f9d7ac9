"""The times of the table are those that the file's events cover."""

import itertools
import json
import re

import __main__ as page

UNITS = {"µs": 1, "ms": 1e3, "s": 1e6}
with open("trace.json", encoding="utf-8") as file:
    events = json.load(file)["traceEvents"]
devices = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
(printed,) = page.printed_by_shell
table = re.findall(r"^(virtual:\d) +([\d.]+) (µs|ms|s) +\d+ %", printed, re.MULTILINE)
shown = {device: float(number) * UNITS[unit] for device, number, unit in table}
assert sorted(shown) == sorted(devices.values()) == ["virtual:0", "virtual:1"]
for tid, device in devices.items():
    own = [event for event in events if event["ph"] == "X" and event["tid"] == tid]
    computed = [
        (event["ts"], event["ts"] + event["dur"]) for event in own if event["cat"] not in ("upload", "download")
    ]
    # between two neighbouring ends something computes, or nothing does
    ends = sorted({end for span in computed for end in span})
    covered = sum(
        after - before
        for before, after in itertools.pairwise(ends)
        if any(start <= before and after <= end for start, end in computed)
    )
    assert abs(covered - shown[device]) <= 0.006 * covered + 1
page.model.close()
