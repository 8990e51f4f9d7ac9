"""A Llama ten times as large as the virtual devices it trains on: memory and time, next to what its plan states.

    python benchmarks/bench_size.py [--millions N] [--adapters N] [--ways WAY ...] [--add] [--json FILE]

Each way trains in a separate process: 150 layers of a Llama in bfloat16, on bytes of the text that Python ships
with, with two virtual devices that have room for a tenth of the weights. A device refuses the whole model. What is on
virtual devices is in the memory of the host, and is part of what is measured and predicted. The memory of the host is
the highest resident memory of all steps, above that of the process after a training of a tiny model.

The moments in 8 bits are those of torchao's AdamW8bit; gradients of two bytes are kept for it. "LoRA" trains adapters
on weights that stay in their safetensors file; its last step reads them from the disk, as each weight is given back to
the system when it was copied. The plain loop trains a model of a tenth of the layers, which fits, with
checkpoints and the same optimizer; the pipeline trains the same one. The plan is the one that is run. With
``--add``, a size is added to those in the file, without a model that fits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from benchmarks.resident import status, tokens_of_text
from roundpipe_runtime import DeviceMemoryError, RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe
from roundpipe_runtime.estimate.footprint import Footprint
from roundpipe_runtime.estimate.hardware import describe_hardware
from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta

LAYERS, SHARE, DEVICES = 150, 10, 2
STEPS = 5  # of a model that fits
ROWS, LENGTH, MICROBATCHES = 2, 64, 2
COPIES, LORA = "float32 copies, moments in 8 bits", "LoRA"
WAYS: dict[str, dict[str, Any]] = {
    COPIES: {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16},
    LORA: {"optim_dtype": torch.float32},
}
BAR = 0.05  # of what the plan states of memory
MMAP_THRESHOLD = 2**16


def llama(millions: int, layers: int = LAYERS) -> Any:
    from transformers import LlamaConfig

    width = max(64, round((1e6 * millions / LAYERS / 12) ** 0.5 / 64) * 64)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=256,
        dtype="bfloat16",
        use_cache=False,
    )


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def _of(folder: str, config: Any) -> str:
    return f"{folder}/{config.hidden_size}-{config.num_hidden_layers}"


def made(way: str, config: Any, folder: str) -> Any:
    """The model in memory, or in its file."""
    from transformers import LlamaForCausalLM

    if way == LORA:
        return adapted(LlamaForCausalLM.from_pretrained(_of(folder, config), dtype="auto")).train()
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()


def optimizer_of(way: str, parameters: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if way == LORA:
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)
    from torchao.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(trained, lr=1e-4)
    return found


class SwitchedDevice(VirtualDevice):
    """A virtual device that counts what is computed on it, or gives back what it was sent, while it is asked to."""

    footprint: Footprint | None = None
    after_copy: Callable[[torch.Tensor], None] | None = None

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        tensor = super().allocate(like)
        if self.footprint is not None:
            self.footprint.count(tensor)
        return tensor

    def copy_in(self, tensor: torch.Tensor, ready: Any = None, *, parameter: bool = False) -> torch.Tensor:
        copy = super().copy_in(tensor, ready, parameter=parameter)
        if parameter and self.after_copy is not None:
            self.after_copy(tensor)
        return copy

    def computing(self, after: Any = None) -> Any:
        return super().computing(after) if self.footprint is None else self.footprint


# -- what a training takes ---------------------------------------------------------------------------------------------


def train(way: str, model: Any, config: RoundPipeRunConfig, limit: int | None, steps: int = 2) -> dict[str, Any]:
    """Wrap and train a model; return its times, losses and memory."""
    devices = [SwitchedDevice(f"virtual:{number}", memory_limit=limit) for number in range(DEVICES)]
    torch.set_num_threads(1)  # of each device
    began = time.perf_counter()
    pipe = wrap_model_to_roundpipe(model, devices=devices, model_run_config=config, lower_threshold=0, **WAYS[way])
    optimizer = optimizer_of(way, pipe.optim_parameters())
    found: dict[str, Any] = {"seconds to wrap": time.perf_counter() - began, "losses": []}
    _count_anew()

    def step(number: int) -> None:
        tokens = tokens_of_text(ROWS, LENGTH, number)
        found["losses"].append(float(pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})))
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async="exact")

    began = time.perf_counter()
    step(0)
    pipe.synchronize()
    found["seconds of the first step"] = time.perf_counter() - began
    found |= least(lambda number: (step(number), pipe.synchronize()), steps)
    found["host bytes"] = status("VmHWM")
    if limit is not None:
        found["device bytes"] = _counted(pipe, devices)
    if limit is not None and way == LORA:
        with evicted(devices) as read:
            step(steps)
            pipe.synchronize()
        found["from disk"] = read
    pipe.close()
    return found


def least(step: Callable[[int], object], steps: int) -> dict[str, float]:
    """The least seconds of steps after the first, by the clock and of the processors."""
    took = []
    for number in range(1, steps):
        began, processor = time.perf_counter(), time.process_time()
        step(number)
        took.append((time.perf_counter() - began, time.process_time() - processor))
    by_clock, of_processors = (min(times) for times in zip(*took, strict=True))
    return {"seconds of a step": by_clock, "processor seconds of a step": of_processors}


def _count_anew() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest resident memory is counted anew


def _counted(pipe: Any, devices: Sequence[SwitchedDevice]) -> int:
    """The most memory of a device in one more run, with what is computed."""
    for device in devices:
        device.footprint = Footprint()
    tokens = tokens_of_text(ROWS, LENGTH, 0)
    gc.collect()
    gc.disable()  # memory must not wait for the collector of cycles, which does not know that a device is full
    pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
    gc.enable()
    pipe.zero_grad()
    peaks = [device.footprint.peak for device in devices if device.footprint is not None]
    for device in devices:
        device.footprint = None
    return max(peaks)


@contextlib.contextmanager
def evicted(devices: Sequence[SwitchedDevice]) -> Iterator[dict[str, float]]:
    """Give each weight of a mapped file back to the system when it was copied; state what is read from the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps", encoding="ascii") as lines:
        mapped = [line.split() for line in lines if line.rstrip().endswith(".safetensors")]
    spans = [(*(int(end, 16) for end in line[0].split("-")), int(line[2], 16), line[-1]) for line in mapped]
    files = {path: os.open(path, os.O_RDONLY) for *_, path in spans}

    def evict(begin: int, end: int) -> None:
        for start, stop, offset, path in spans:
            first, last = max(begin, start) // mmap.PAGESIZE * mmap.PAGESIZE, min(end, stop)
            if first < last:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
                os.posix_fadvise(files[path], offset + first - start, last - first, os.POSIX_FADV_DONTNEED)

    for start, stop, *_ in spans:
        evict(start, stop)
    for device in devices:
        device.after_copy = lambda tensor: evict(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    found: dict[str, float] = {"file bytes": sum(os.fstat(file).st_size for file in files.values())}
    faults, read, began = _major_faults(), _bytes_read(), time.perf_counter()
    yield found
    found["seconds"] = time.perf_counter() - began
    found["bytes read"], found["page faults"] = _bytes_read() - read, _major_faults() - faults
    for device in devices:
        device.after_copy = None
    for file in files.values():
        os.close(file)


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _bytes_read() -> int:
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def refused(model: Any, limit: int) -> str:
    """The error of a device that the whole model is copied to."""
    device, held = VirtualDevice("virtual:0", memory_limit=limit), []
    try:
        for parameter in model.parameters():
            held.append(device.copy_in(parameter.detach(), parameter=True))
    except DeviceMemoryError as error:
        return str(error)
    finally:
        device.close()
    raise SystemExit("the device has room for the whole model, which is not what is to be shown")


# -- what the plan states, and a plain loop ----------------------------------------------------------------------------


def planned(way: str, config: Any, limit: int) -> tuple[Any, dict[str, Any]]:
    """The plan, and its memory."""
    began = time.perf_counter()
    hardware = describe_hardware(f"virtual:{DEVICES}", memory=limit, link=1e10, flops=1e11)
    model = model_on_meta(config)
    model = adapted(model) if way == LORA else model
    training = PlannedTraining(model, hardware, optim_dtype=WAYS[way].get("optim_dtype"))
    report = training.report(batch=ROWS, length=LENGTH, num_microbatch=MICROBATCHES)
    host, on_devices = report.host_memory, sum(memory.total for memory in report.device_memory)
    total = host.total
    if way != LORA:  # gradients of two bytes, and two moments of one byte each, with a scale of 4 for 256 of them
        trained = sum(parameter.numel() for parameter in model.parameters())
        total += int(trained * (2 + 2 * (1 + 4 / 256))) - host.gradients - host.optimizer
    return report.step.plan, {
        "seconds to plan": time.perf_counter() - began,
        "stages": len(report.step.stages),
        "device bytes": max(memory.total for memory in report.device_memory),
        "host bytes": total + on_devices,
    }


def plain(way: str, config: Any, folder: str) -> dict[str, float]:
    """What a step of a plain loop takes."""
    torch.set_num_threads(1)  # a second one that waits for a core spins, which counts as work
    model = made(way, config, folder)
    model.gradient_checkpointing_enable()
    if way == LORA:
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [torch.nn.Parameter(p.detach().float()) for p in trained] if way == COPIES else trained
    optimizer = optimizer_of(way, copies)

    def step(number: int) -> None:
        for tokens in tokens_of_text(ROWS, LENGTH, number).chunk(MICROBATCHES):
            (model(input_ids=tokens, labels=tokens).loss / MICROBATCHES).backward()
        if way == COPIES:
            for copy, parameter in zip(copies, trained, strict=True):
                copy.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if way == COPIES:
            with torch.no_grad():
                for copy, parameter in zip(copies, trained, strict=True):
                    parameter.copy_(copy)

    step(0)
    return least(step, STEPS)


# -- one way in a process of its own -----------------------------------------------------------------------------------


def measure(way: str, millions: int, only_fits: bool, adds: bool) -> dict[str, Any]:
    config, small, tiny = llama(millions), llama(millions, LAYERS // SHARE), llama(1, 2)
    run = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with tempfile.TemporaryDirectory() as folder:
        if way == LORA:  # in a separate process, so that this one never held the weights
            for part in (small,) if only_fits else (config, small, tiny):
                command = [sys.executable, __file__, "--save", folder, str(part.hidden_size)]
                subprocess.run([*command, str(part.num_hidden_layers)], check=True)
        both = {}
        if not adds:
            both["plain"] = plain(way, small, folder)
            both["pipeline"] = train(way, made(way, small, folder), run, None, STEPS)
        fits = {name: {what: took[what] for what in took if "of a step" in what} for name, took in both.items()}
        if only_fits:
            return {"a model that fits": fits}
        weights = sum(p.nbytes for p in model_on_meta(config).parameters())
        limit = weights // SHARE
        plan, stated = planned(way, config, limit)
        train(way, made(way, tiny, folder), run, None)
        gc.collect()
        before, began = status("VmRSS"), time.perf_counter()
        model = made(way, config, folder)
        to_make = time.perf_counter() - began
        error = refused(model, limit)
        gc.collect()
        of_plan = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
        found = train(way, model, of_plan, limit)
    found["host bytes"] -= before
    return {
        "parameters": weights // 2,
        "limit of a device": limit,
        "refused": error,
        "seconds to make": to_make,
        **found,
        "planned": stated,
        **({"a model that fits": fits} if fits else {}),
    }


def save(folder: str, width: int, layers: int) -> None:
    config = llama(1, layers)
    config.hidden_size, config.intermediate_size = width, round(width * 8 / 3 / 64) * 64
    config.num_attention_heads = config.num_key_value_heads = width // 64
    made(COPIES, config, "").save_pretrained(_of(folder, config))


def misses(way: str, found: dict[str, Any]) -> list[str]:
    """Print what was found of a way; return what is further from its plan than it may be."""
    plan, fits = found["planned"], found.get("a model that fits", "-")
    print(f"{way}: {found['parameters'] / 1e6:,.0f} M parameters, {plan['stages']} stages; {found['refused']}")
    far = []
    for what in ("device bytes", "host bytes"):
        off = found[what] / plan[what] - 1
        print(f"  {what}: {found[what] / 1e6:,.1f} MB, by the plan {plan[what] / 1e6:,.1f} ({off:+.1%})")
        if abs(off) > BAR:
            far.append(f"{way}: {what} {off:+.1%}")
    times = {
        name: round(found[f"seconds {name}"], 2) for name in ("to make", "to wrap", "of the first step", "of a step")
    }
    print(f"  seconds {times}, losses {[round(loss, 3) for loss in found['losses']]}")
    print(f"  a model that fits: {fits}; {found.get('from disk', '')}")
    sys.stdout.flush()
    return far


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--adapters", type=int, help="millions of parameters for LoRA, default as --millions")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--fits", action="store_true", help="only the model that fits; the rest of --json is kept")
    part.add_argument("--add", action="store_true", help="add this size to --json, without a model that fits")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--save", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save:
        save(arguments.save[0], int(arguments.save[1]), int(arguments.save[2]))
        return 0
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.millions, arguments.fits, arguments.add)))
        return 0
    far: list[str] = []
    here = machine()
    goes_on = arguments.fits or arguments.add
    if goes_on and not (arguments.json and arguments.json.exists()):
        parser.error("--fits and --add change the results of an earlier run: --json FILE")
    kept = json.loads(arguments.json.read_text(encoding="utf-8"))["ways"] if goes_on else {}
    results = dict(kept) if arguments.add else {}
    for way in arguments.ways:
        millions = arguments.adapters or arguments.millions if way == LORA else arguments.millions
        command = [sys.executable, __file__, "--one", way, "--millions", str(millions)]
        command += ["--fits"] * arguments.fits + ["--add"] * arguments.add
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        name = f"{way}, {millions:,} million parameters" if arguments.add else way
        results[name] = kept.get(name, {}) | json.loads(done.stdout.splitlines()[-1])
        far += misses(name, results[name])
        if arguments.json:
            used = {name: version(name) for name in ("torch", "transformers", "peft", "torchao")}
            stored = {"versions": used, "machine": here, "layers": LAYERS, "tokens": ROWS * LENGTH, "ways": results}
            arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print("further from the plan than 5 %:", far or "none")
    return bool(far)


if __name__ == "__main__":
    sys.exit(main())
