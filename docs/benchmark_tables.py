"""The page of benchmarks: tables and plots of what `benchmarks/` has stored in `docs/data/`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
COLOURS = ("#2a7de1", "#8fbcf0", "#e1812c", "#3a923a", "#8b8b8b", "#9372b2")
GREY = "#808080"  # axes and letters that are seen on a light and on a dark page


def write_benchmarks(folder: Path) -> None:
    """Write one file of Markdown per benchmark into ``folder``, and the pictures that they show."""
    folder.mkdir(exist_ok=True)
    for name, section in (
        ("export", _export),
        ("runtimes", _runtimes),
        ("pipeline", _pipeline),
        ("proof", _proof),
        ("ranks", _ranks),
        ("steps", _steps),
        ("memory", _memory),
        ("lengths", _lengths),
        ("size", _size),
        ("kept", _kept),
        ("experts", _experts),
        ("simulate", _simulate),
        ("dry", _dry),
        ("convergence", _convergence),
        ("layers", _layers),
        ("store", _store),
        ("integers", _integers),
    ):
        data = json.loads((DATA / f"bench-{name}.json").read_text(encoding="utf-8"))
        text = "\n".join([*section(data, folder), "", _made_with(name, data), ""])
        path = folder / f"bench_{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
            path.write_text(text, encoding="utf-8")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


def _made_with(name: str, data: Mapping[str, Any]) -> str:
    versions = data.get("versions", {"torch": data.get("torch")})
    shown = ", ".join(f"{library} {version}" for library, version in versions.items())
    load = f", system load {data['load'][0]:.1f}" if "load" in data and "load" not in data["machine"] else ""
    made_by, numbers = f"`python benchmarks/bench_{name}.py`", f"`docs/data/bench-{name}.json`"
    return f"Measured by {made_by} on {data['machine']}{load}, with {shown}. All numbers are in {numbers}."


# --- files of several exporters ---------------------------------------------------------------------------------------


def _export(data: Mapping[str, Any], folder: Path) -> list[str]:
    lines = []
    for family, found in data["models"].items():
        weights, made, calls = found["bytes of the weights"], found["made"], found["calls"]
        sides = list(calls[0]["milliseconds"])
        picture = folder / f"bench_export_{family}.svg"
        _draw_tokens(calls, sides, picture)
        lines += ["", f"### {family}, {found['layers']} layers, {weights / 4e6:.0f} million parameters", ""]
        lines += [f"![milliseconds per token by tokens in the cache]({picture.name})", ""]
        if "openings" in found:
            lines += [
                f"Each ONNX file was loaded {found['openings']} times, with the weights in huge memory pages.",
                "",
            ]

        def cells(entry: str, form: str, made: Any = made, sides: Any = sides, scale: float = 1) -> list[str]:
            return [format(made[side][entry] / scale, form) if entry in made.get(side, {}) else "" for side in sides]

        rows = [
            ["export, CPU s", *cells("processor seconds", ".1f")],
            ["peak memory / weights", *cells("peak bytes", ".1f", scale=weights)],
            ["nodes", *cells("nodes", ",.0f")],
        ]
        for call in calls:
            took = [f"{call['milliseconds'][side]:.1f}" if side in call["milliseconds"] else "" for side in sides]
            rows.append([f"{call['work']}, ms", *took])
        rows.append(["largest difference to eager", *(_largest_difference(calls, side) for side in sides)])
        lines += _table(["", *sides], rows)
        failed = [(side, costs["error"]) for side, costs in made.items() if "error" in costs]
        lines += [f"\n{side} wrote no file: `{error}`." for side, error in failed]
    return lines


def _runtimes(data: Mapping[str, Any], folder: Path) -> list[str]:
    made, calls = data["made"], data["calls"]
    sides = list(calls[0]["milliseconds"])
    picture = folder / "bench_runtimes.svg"
    _draw_tokens(calls, sides, picture)
    lines = ["", f"### llama, {data['layers']} layers, {data['parameters'] / 1e6:.0f} million parameters", ""]
    lines += [f"![milliseconds per token by tokens in the cache]({picture.name})", ""]

    def cells(entry: str, form: str, scale: float = 1) -> list[str]:
        return [format(made[side][entry] / scale, form) if entry in made.get(side, {}) else "" for side in sides]

    rows = [
        ["write the file, CPU s", *cells("processor seconds", ".1f")],
        ["size of the file, MB", *cells("bytes on disk", ",.0f", 1e6)],
        ["planned memory, MB", *cells("planned bytes", ",.0f", 1e6)],
    ]
    for call in calls:
        rows.append([f"{call['work']}, ms", *(f"{call['milliseconds'][side]:.1f}" for side in sides)])
    rows.append(["largest difference to eager", *(_largest_difference(calls, side) for side in sides)])
    return [*lines, *_table(["", *sides], rows)]


def _largest_difference(calls: Iterable[Mapping[str, Any]], side: str) -> str:
    largest = max(call["off"].get(side, 0.0) for call in calls)
    return "" if side == "eager" else f"{largest:.0e}"


def _draw_tokens(calls: Sequence[Mapping[str, Any]], sides: Sequence[str], path: Path) -> None:
    decode = [call for call in calls if call["work"].startswith("decode") and not call["work"].endswith("rows")]
    lengths = [int(call["work"].split()[1]) for call in decode]
    with plot(path) as (axes,):
        for side, colour in zip(sides, COLOURS, strict=False):
            points = [(length, call["milliseconds"].get(side)) for length, call in zip(lengths, decode, strict=True)]
            axes.plot(*zip(*[point for point in points if point[1]], strict=True), "o-", color=colour, label=side)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens in the cache", color=GREY)
        axes.set_ylabel("ms per token, one thread", color=GREY)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, labelcolor=GREY, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


@contextmanager
def plot(path: Path, heights: Sequence[int] = (1,)) -> Iterator[Sequence[Any]]:
    """Axes above each other, with these shares of the height, which are written to ``path``."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": path.name, "text.color": GREY, "font.size": 9}):  # the same bytes each time
        size = (7, 3.2 + 0.8 * (len(heights) - 1))
        figure, rows = pyplot.subplots(len(heights), 1, sharex=True, squeeze=False, figsize=size, height_ratios=heights)
        for axes in rows[:, 0]:
            axes.tick_params(colors=GREY, which="both")
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(GREY)
        yield rows[:, 0]
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


# --- the others -------------------------------------------------------------------------------------------------------


def _pipeline(data: Mapping[str, Any], _: Path) -> list[str]:
    ours = data["milliseconds"]["pipeline"]
    processor = data["milliseconds of processors"]
    names = {"plain": "loop with checkpointing", "plain, one thread": "loop with checkpointing, one thread"}
    rows = [
        [
            names.get(name, name),
            f"{took:.0f}",
            f"{ours / took:.2f}x" if name != "pipeline" else "",
            f"{processor[name]:.0f}",
        ]
        for name, took in data["milliseconds"].items()
    ]
    per_layer = data["microseconds per layer and microbatch"]
    return [
        *_table(["a step", "ms", "pipeline / this row", "CPU ms"], rows),
        "",
        f"The pipeline takes {per_layer['overhead, processor']:.0f} µs more CPU time per layer and microbatch than "
        "the layers alone.",
    ]


def _proof(data: Mapping[str, Any], _: Path) -> list[str]:
    now, before = data["found"]["now"], data["found"]["before"]
    rows = []
    for part, name in (
        ("wrap", "wrap, with the check of the split model"),
        ("first step", "first step"),
        ("later step", "later step"),
    ):
        cells = [f"{side[part]['seconds']:.1f} s, {side[part]['bytes'] / 1e9:.2f} GB" for side in (before, now)]
        rows.append([name, *cells])
    rows.append(["check of the loss / check of the split model", "", f"{data['ratios']['proof / check before']:.2f}"])
    return _table(["", "without a check of the loss", "now"], rows)


def _ranks(data: Mapping[str, Any], _: Path) -> list[str]:
    cost, line, kept = data["cost"], data["line"], data["memory and sent"]
    rows = [
        ["CPU time / CPU time of the same pipeline in one process", f"{cost['ranks over alone']:.2f}"],
        ["CPU time / CPU time of FSDP2", f"{cost['ranks over FSDP2']:.2f}"],
        ["share of communication that is not hidden, if it takes half the time of compute", f"{line['exposed']:.0%}"],
        ["bytes per parameter kept on each host", f"{kept['bytes per parameter kept']:.2f}"],
        ["the same by the formula 2 + 16 / N", f"{kept['bytes per parameter kept, formula']:.2f}"],
        ["bytes per parameter sent by each rank in a step", f"{kept['bytes per parameter sent']:.2f}"],
        ["the same by the formula", f"{kept['bytes per parameter sent, formula']:.2f}"],
        ["collectives of gradients and weights per layer", f"{kept['collectives of a step'] / kept['layers']:.0f}"],
    ]
    return _table([f"{data['ranks']} processes, {data['parameters'] / 1e6:.0f} million parameters", ""], rows)


def _steps(data: Mapping[str, Any], _: Path) -> list[str]:
    rows = []
    for name, found in data["milliseconds"].items():
        times = [found[side] for side in ("compute", "optimizer", "synchronous", "exact", "one step late")]
        largest = max(found["compute"], found["optimizer"])
        digits = 0 if largest >= 100 else 1
        rows.append([name, *(f"{took:.{digits}f}" for took in times), f"{found['exact'] / largest:.2f}x"])
    head = ["layers, share of the optimizer", "compute, ms", "optimizer, ms", "synchronous, ms", "exact, ms"]
    return ["", *_table([*head, "one step late, ms", "exact / larger of the first two"], rows)]


def _memory(data: Mapping[str, Any], _: Path) -> list[str]:
    sizes = sorted({size for found in data["ways"].values() for size in found}, key=int)

    def cell(found: Mapping[str, float]) -> str:
        plan = f", planned {found['planned']:.2f}" if "planned" in found else ""
        return f"{found['bytes per parameter']:.2f}{plan}" if found else ""

    rows = [[way, *(cell(found.get(size, {})) for size in sizes)] for way, found in data["ways"].items()]
    lines = ["", *_table(["bytes per parameter", *(f"{size} million" for size in sizes)], rows)]
    if data.get("losses"):
        number = len(next(iter(data["losses"].values())))
        chosen = sorted({0, number // 4, number // 2, 3 * number // 4, number - 1})
        heads = [f"steps {20 * place + 1} to {20 * place + 20}" for place in chosen]
        rows = [[way, *(f"{found[place]:.3f}" for place in chosen)] for way, found in data["losses"].items()]
        lines += ["", *_table(["mean loss, nats per byte", *heads], rows)]
    return lines


def _integers(data: Mapping[str, Any], _: Path) -> list[str]:
    ways = {
        "aware": "`train --quantize-aware int4`, `export --quantize keep`",
        "float": "`train`, `export --quantize int4`",
        "qlora": "`train --quantize nf4` (QLoRA), merged, `export --quantize int4`",
    }
    rows = [
        [
            ways[way],
            *(f"{found[name]:.3f}" for name in ("loss_trained", "loss_file")),
            *(f"{found[name]} of {found['tokens']}" for name in ("fed", "alone")),
            f"{found['megabytes']:.1f}",
        ]
        for way, found in data["ways"].items()
    ]
    heads = [
        data["model"],
        "loss, trained model",
        "loss, file",
        "equal tokens, same past",
        "equal tokens, own past",
        "MB",
    ]
    return _table(heads, rows)


def _lengths(data: Mapping[str, Any], _: Path) -> list[str]:
    rows = [
        [
            f"{int(length):,} tokens",
            f"{found['bytes'] / 1e6:,.0f}",
            f"{found['bytes'] / int(length) / 1e3:.1f}",
            f"{found['seconds']:.0f}",
        ]
        for length, found in data["lengths"].items()
    ]
    sizes = sorted(map(int, data["lengths"]))
    further = [
        (data["lengths"][str(more)]["bytes"] - data["lengths"][str(fewer)]["bytes"]) / (more - fewer) / 1e3
        for fewer, more in itertools.pairwise(sizes)
    ]
    text = (
        f"Memory grows linearly: each more token takes {further[-2]:.1f} kB between {sizes[-3]:,} and {sizes[-2]:,} "
        f"tokens, and {further[-1]:.1f} kB between {sizes[-2]:,} and {sizes[-1]:,}. Time grows faster, because each "
        "token attends to all earlier tokens."
    )
    return [*_table(["one row of", "MB", "kB per token", "seconds"], rows), "", text]


def _size(data: Mapping[str, Any], _: Path) -> list[str]:
    ways = data["ways"]

    def row(name: str, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [name, *(cell(found) for found in ways.values())]

    def beside_plan(what: str, unit: float) -> Callable[[Mapping[str, Any]], str]:
        return lambda found: f"{found[what] / unit:,.2f}, {found['planned'][what] / unit:,.2f}"

    def on_both(what: str) -> Callable[[Mapping[str, Any]], str]:
        def cell(found: Mapping[str, Any]) -> str:
            fits = found.get("a model that fits", {})
            return ", ".join(f"{fits[way][what]:.1f}" for way in ("pipeline", "plain") if way in fits) or "-"

        return cell

    rows = [
        row("million parameters", lambda found: f"{found['parameters'] / 1e6:,.0f}"),
        row("memory of a device, MB", lambda found: f"{found['limit of a device'] / 1e6:,.0f}"),
        row("stages", lambda found: str(found["planned"]["stages"])),
        row("peak of a device, MB: measured, planned", beside_plan("device bytes", 1e6)),
        row("peak of the host, GB: measured, planned", beside_plan("host bytes", 1e9)),
        row("seconds to plan, to wrap", lambda f: f"{f['planned']['seconds to plan']:.0f}, {f['seconds to wrap']:.0f}"),
        row("first step, s", lambda found: f"{found['seconds of the first step']:.0f}"),
        row("next step: seconds, CPU seconds", lambda found: ", ".join(f"{found[name]:.0f}" for name in _OF_A_STEP)),
        row("a tenth of the layers, s: pipeline, PyTorch loop", on_both(_OF_A_STEP[0])),
        row("the same in CPU seconds", on_both(_OF_A_STEP[1])),
    ]
    lines = ["", *_table([f"{data['layers']} layers, {data['tokens']} tokens a step", *ways], rows)]
    for way, found in ways.items():
        if "from disk" in found:
            disk = found["from disk"]
            read, whole = disk["bytes read"] / 1e9, disk["file bytes"] / 1e9
            lines += [
                "",
                f"{way}, if no weight of the file stays in memory: a training step reads {read:.2f} GB from the file "
                "of "
                f"{whole:.2f} GB, with {disk['page faults']:,} page faults that wait for the disk, in "
                f"{disk['seconds']:.0f} s. Each weight is read in forward and in backward; the rest is "
                "read-ahead of the system.",
            ]
    return lines


def _kept(data: Mapping[str, Any], _: Path) -> list[str]:
    def both(found: Mapping[str, Any], what: str, unit: float = 1e6, form: str = ",.1f") -> str:
        return " → ".join(format(found[side][what] / unit, form) for side in ("off", "auto"))

    head = ["", "device, MB", "uploaded per step, MB", "kept, MB", "peak of copies, MB", "seconds per step"]
    rows = [
        [
            name,
            f"{found['limit of the device'] / 1e6:,.0f}",
            both(found, "bytes uploaded"),
            both(found, "bytes that stay", form=",.0f"),
            both(found, "peak bytes of copies", form=",.0f"),
            both(found, "seconds of a step", 1, ".2f"),
        ]
        for name, found in data["cases"].items()
    ]
    return ["", *_table(head, rows)]


def _experts(data: Mapping[str, Any], _: Path) -> list[str]:
    head = ["", "tokens", "all, MB", "routed, MB", "share", "seconds, all", "seconds, routed"]
    rows = [
        [
            f"{name}, {case['kind']}",
            str(case["tokens"]),
            *(f"{case[way]['bytes uploaded'] / 1e6:,.0f}" for way in ("all", "routed")),
            f"{case['routed']['bytes uploaded'] / case['all']['bytes uploaded']:.2f}",
            *(f"{case[way]['seconds of a step']:.3f}" for way in ("all", "routed")),
        ]
        for name, cases in data["cases"].items()
        for case in cases
    ]
    return ["", *_table(head, rows)]


_OF_A_STEP = ("seconds of a step", "processor seconds of a step")


def _simulate(data: Mapping[str, Any], _: Path) -> list[str]:
    rows = []
    for case in data["cases"]:
        (simulated, measured), (bubble, waited) = case["seconds"], case["bubble"]
        off = max((one / other - 1 for one, other in case["peaks"]), key=abs, default=None)
        cells = [f"{simulated:.3f}", f"{measured:.3f}", f"{simulated / measured - 1:+.1%}"]
        rows.append([case["name"], *cells, f"{bubble:.1%}", f"{waited:.1%}", "" if off is None else f"{off:+.1%}"])
    head = ["a step of", "simulated, s", "measured, s", "", "bubble, simulated", "bubble, measured", "peak bytes"]
    return ["", *_table(head, rows)]


def _dry(data: Mapping[str, Any], _: Path) -> list[str]:
    names = {"kernels": "kernels", "up": "link up", "down": "link down"}
    rows = []
    for case in data["cases"]:
        busy = case["busy"]
        most = max(busy, key=lambda name: busy[name])
        shares = [f"**{share:.0%}**" if name == most else f"{share:.0%}" for name, share in busy.items()]
        rows.append(
            [
                case["model"],
                f"{case['devices']} x {case['kind']}",
                f"{case['microbatches']} x {case['tokens']:,}",
                f"{case['milliseconds']:,.0f}",
                f"{case['tokens per second']:,.0f}",
                *shares,
                f"{case['peak bytes'] / 1e9:.1f}",
            ]
        )
    head = ["model", "devices", "tokens", "ms a step", "tokens/s", *names.values(), "peak, GB"]
    host, again = data["host"]["overhead"], data["host"]["with torch's checkpoints"] - data["host"]["layers alone"]
    least, most = data["delay"].values()
    text = (
        f"On a busy machine, the pipeline adds {host:.0f} µs of CPU time to each layer call; torch's activation "
        f"checkpointing adds {again:.0f} µs. The time of the simulated device for copies, events and waits is not "
        "included. If a layer takes a millisecond, the device hardly waits for the host: a step with 32 such layers "
        f"and 4 microbatches takes {least:.1f} ms if the host takes no time, and {most:.1f} ms if the host takes "
        "1,000 µs per layer and microbatch."
    )
    return [*_table(head, rows), "", text]


def _convergence(data: Mapping[str, Any], folder: Path) -> list[str]:
    plain, pipe = (data["runs"][name] for name in ("plain", "virtual:2"))
    steps, last = data["steps"], max(1, data["steps"] // 10)
    pairs = list(zip(plain["losses"], pipe["losses"], strict=True))
    shown = [(f"step {step}", *pairs[step - 1]) for step in (1, steps // 4, steps // 2, 3 * steps // 4, steps)]
    ends = (sum(run["losses"][-last:]) / last for run in (plain, pipe))
    shown += [(f"mean of the last {last} steps", *ends), ("held-out text", plain["held_out"], pipe["held_out"])]
    picture = folder / "bench_convergence.svg"
    with plot(picture, heights=(2, 1)) as (above, below):
        numbers = range(1, steps + 1)
        above.plot(numbers, plain["losses"], linewidth=3, color=COLOURS[1], label="plain transformers")
        above.plot(numbers, pipe["losses"], linewidth=0.9, color=COLOURS[2], label="roundpipe train, 2 devices")
        above.set_ylabel("loss, nats per byte", color=GREY)
        above.legend(frameon=False, labelcolor=GREY)
        below.semilogy(numbers, [max(abs(a - b) / a, 1e-8) for a, b in pairs], linewidth=0.8, color=COLOURS[0])
        below.set_ylabel("difference", color=GREY)
        below.set_xlabel("step", color=GREY)
    is_equal = data["bit-equal on 1, 2 and 3 devices"]
    return [
        f"![the losses of both trainings, which overlap, and their difference]({picture.name})",
        "",
        *_table(
            ["loss", "plain", "pipeline", "relative difference"],
            [[name, f"{one:.6f}", f"{other:.6f}", f"{abs(one - other) / one:.4%}"] for name, one, other in shown],
        ),
        "",
        f"The pipeline's losses and weights are {'' if is_equal else 'not '}bitwise identical on one, two and three "
        "devices. The losses of pipeline and plain training differ in a step by at most "
        f"{data['largest relative difference of a step']:.3%}.",
    ]


def _layers(data: Mapping[str, Any], _: Path) -> list[str]:
    rows = []
    for name, found in data["results"].items():
        took, ratios = found["microseconds"], found["ratios"]
        cells = [
            f"{took[way]:.0f} µs, {ratios[way]:.1f}x ({ratios[f'least {way}']:.1f}x)"
            for way in ("tree_flatten", "tree_unflatten")
        ]
        rows.append([f"`{name}`", str(found["leaves"]), *cells])
    return _table(["layers of the cache", "leaves", "flatten", "unflatten"], rows)


def _store(data: Mapping[str, Any], _: Path) -> list[str]:
    rows = [
        [f"`{name}`", f"{found['seconds']:.1f}", f"{found['above'] / 1e6:.0f}"]
        for name, found in data["results"].items()
    ]
    return _table(["", "seconds", "memory in addition to the values, MB"], rows)
