"""Wheels for a machine without a network: fetched and cut down here, unpacked there without pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["CACHE", "LINE", "fetch", "unpacked"]

LINE = "python benchmarks/gpu_day.py --wheels DIR"  # where there is a network; then with a part, there
CACHE = Path.home() / ".cache" / "gpu-day"

_MOST = 40e6  # bytes of all wheels
_PYTHON = "3.12"
# A folder per program, so that none finds what another one brings: transformers imports torchao where it is.
_GROUPS = {
    "base": ["msgspec==0.22.0"],
    "roundpipe": ["roundpipe==0.1.1", "beartype==0.23.1", "transformers==4.57.6", "tokenizers==0.22.1",
                  "huggingface_hub==0.36.0", "requests==2.32.5", "urllib3==2.5.0", "charset_normalizer==3.4.4",
                  "idna==3.11", "certifi==2025.11.12"],
    "deepspeed": ["hjson==3.1.0", "pydantic==2.12.5", "pydantic_core==2.41.5", "annotated_types==0.7.0",
                  "typing_inspection==0.4.2"],
    "torchao": ["torchao==0.18.0"],
    "bitsandbytes": ["bitsandbytes==0.50.2"],
}  # fmt: skip
# Comes as source alone. Its operators are compiled when they are first used, there.
_SOURCE = {"deepspeed": "deepspeed==0.19.8"}
# Kernels of bitsandbytes for the CUDA that torch has there, and for the CPU; the others are 35 MB.
_KEPT_LIBRARIES = ("libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so")


def fetch(folder: Path) -> int:
    """Fill a folder with the wheels of all programs, and return its bytes."""
    for group, names in _GROUPS.items():
        place = folder / group
        place.mkdir(parents=True, exist_ok=True)
        platforms = (f"manylinux{one}_x86_64" for one in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
        target = [text for platform in platforms for text in ("--platform", platform)]
        _pip("download", "--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp", *target,
             "--dest", str(place), *names)  # fmt: skip
    for group, name in _SOURCE.items():
        if not list((folder / group).glob(f"{group}-*.whl")):
            _pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder / group), name, DS_BUILD_OPS="0")
    for wheel in folder.glob("bitsandbytes/*.whl"):
        _cut_down(wheel)
    size = sum(path.stat().st_size for path in folder.glob("*/*.whl"))
    if size > _MOST:
        raise SystemExit(f"{folder} has {size / 1e6:.1f} MB, but the limit is {_MOST / 1e6:.0f}.")
    return size


def _pip(command: str, *arguments: str, **environment: str) -> None:
    line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
    if subprocess.run(line, env={**os.environ, **environment}).returncode:
        raise SystemExit(f"pip could not fetch them: {' '.join(line)}")


def _cut_down(wheel: Path) -> None:
    """Leave out the libraries of other platforms."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            name = Path(entry.filename).name
            if not (name.startswith("lib") and name.endswith(".so")) or name in _KEPT_LIBRARIES:
                target.writestr(entry, source.read(entry))
    smaller.replace(wheel)


def unpacked(folder: Path | None, group: str) -> list[str]:
    """Unpack the wheels of a group once, and return the folders for PYTHONPATH: none where there are no wheels."""
    wheels = sorted(folder.glob(f"{group}/*.whl")) if folder else []
    if not wheels:
        return []
    names = ",".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    known = hashlib.sha256(names.encode()).hexdigest()[:12]
    place = CACHE / f"{group}-{known}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=place.parent))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part)
        for data in part.glob("*.data"):
            for kind in ("purelib", "platlib"):
                if (data / kind).is_dir():
                    shutil.copytree(data / kind, part, dirs_exist_ok=True)
        part.rename(place)
    return [str(place)]
