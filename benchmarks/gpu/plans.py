"""Plans of rows, from the measured machine: ``python -m benchmarks.gpu.plans MACHINE ROW...`` prints a line for each.

They are written before the rows run, and shown next to what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.programs import missing
from benchmarks.gpu.rows import OURS, Row, config_of, named_row
from roundpipe_runtime.estimate.hardware import Hardware

__all__ = ["machine_from", "plan"]

_MODES: dict[str, Literal[False, True, "exact"]] = dict(zip(OURS, (False, "exact", True), strict=True))


def machine_from(path: Path) -> Hardware:
    """The machine of a profile that was written on this machine."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Hardware(**{**content, "names": tuple(content["names"])})


def plan(row: Row, hardware: Hardware) -> dict[str, Any]:
    """What ``roundpipe plan`` states of a row: seconds by when the optimizer steps, memory, bytes of the link."""
    if absent := missing(OURS[0], row):
        return {"error": f"{', '.join(absent)} is missing here", "missing": absent}
    from roundpipe_runtime.fine_tune import Lora, add_lora
    from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta
    from roundpipe_runtime.huggingface.quantize import quantize_frozen

    model = model_on_meta(config_of(row), dtype=torch.bfloat16)
    if row.few_bits:
        model = quantize_frozen(model, "nf4")
    if row.adapters:
        with torch.device("meta"):
            model = add_lora(model, Lora(row.adapters, 2 * row.adapters))
    training = PlannedTraining(model, hardware, optim_dtype=torch.float32 if row.states == "float32" else None)
    report = training.report(batch=row.batch, length=row.length, num_microbatch=row.microbatches)
    steps = {name: report.simulate(is_async=mode) for name, mode in _MODES.items()}
    return {
        "seconds": {name: step.seconds for name, step in steps.items()},
        "optimizer seconds that show": {name: step.exposed_optimizer for name, step in steps.items()},
        "device peak": max(memory.total for memory in report.device_memory),
        "host": report.host_bytes,
        "link bytes": {
            "up": max(link[0] for link in report.simulation.links),
            "down": max(link[1] for link in report.simulation.links),
        },
        "bottleneck": report.simulated.bottleneck,
        "fits": {"device": report.fits_devices, "host": report.fits_host},
    }


def main() -> None:
    path, *rows = sys.argv[1:]
    machine = machine_from(Path(path))
    for row in rows:
        print(json.dumps({"row": row, **plan(named_row(row), machine)}), flush=True)


if __name__ == "__main__":
    main()
