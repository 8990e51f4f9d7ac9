"""Build the wheel and the source archive, check them, and run the README from the wheel: `make release-check`.

The wheel is installed into a fresh environment for each Python, and runs in a folder without the sources. A version of
Python that is not installed is a failure, unless `--pythons` leaves it out.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = ("yobx_flatten", "roundpipe_runtime")
# Nothing that a program wrote, and no folder of a tool.
LEFTOVERS = re.compile(
    r"__pycache__|\.py[cod]$|\.(?:pytest|mypy|ruff)_cache|\.hypothesis|\.venv|(?:^|/)build/|\.onnx(?:\.data)?$"
)
IN_SDIST = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "hatch_build.py", "Makefile")


def wrong_in_wheel(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Return what is wrong in a wheel: missing files of the packages, anything else than these, and leftovers."""
    found, wanted = set(names), set(sources)
    metadata = {name for name in found if name.split("/")[0].endswith(".dist-info")}
    wrong = [f"missing: {name}" for name in sorted(wanted - found)]
    wrong += [f"not a file of the repository: {name}" for name in sorted(found - wanted - metadata)]
    wrong += [f"missing: {name}/py.typed" for name in PACKAGES if f"{name}/py.typed" not in found]
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        wrong.append("missing: LICENSE")
    return wrong


def wrong_in_sdist(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Return what is wrong in a source archive: missing files of the packages and of the build, and leftovers."""
    found = set(names)
    wrong = [f"missing: {name}" for name in sorted({*sources, *IN_SDIST} - found)]
    return wrong + [f"leftover: {name}" for name in sorted(found) if LEFTOVERS.search(name)]


def wrong_in_metadata(text: str) -> list[str]:
    """Return what is wrong in the metadata of a wheel: its description is Markdown, and its links lead somewhere."""
    metadata = email.message_from_string(text)
    body = metadata.get_payload()
    wrong = [
        f"no {key}"
        for key in ("Name", "Version", "Summary", "Requires-Python", "License-Expression")
        if not metadata[key]
    ]
    if metadata["Description-Content-Type"] != "text/markdown" or len(body) < 1000:
        wrong.append("the description is not the README")
    wrong += [f"a link into the repository: {link}" for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", body)]
    return wrong + [f"a picture of the repository: {one}" for one in re.findall(r'<img src="(?!https?:)([^"]+)', body)]


def programs(text: str) -> list[str]:
    """Return the Python programs of the README."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path = ROOT, clean: bool = False) -> str:
    """Run a command and return what it printed; an error shows that."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"} if clean else set()
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def build(to: Path, work: Path) -> tuple[Path, Path]:
    """Build both archives from the files that are committed, and the wheel once more from the source archive."""
    run(sys.executable, "-m", "venv", work / "tools")
    tool = work / "tools" / "bin" / "python"
    run(tool, "-m", "pip", "install", "--quiet", "hatchling>=1.27", "twine")
    tree = work / "tree"
    run("git", "worktree", "add", "--detach", "--quiet", tree, "HEAD")
    try:
        run(tool, "-m", "hatchling", "build", "-d", to, cwd=tree)
    finally:
        run("git", "worktree", "remove", "--force", tree)
    (wheel,), (archive,) = to.glob("*.whl"), to.glob("*.tar.gz")
    run(tool, "-m", "twine", "check", "--strict", wheel, archive)
    with tarfile.open(archive) as opened:
        opened.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    run(tool, "-m", "hatchling", "build", "-t", "wheel", "-d", work / "again", cwd=unpacked)
    (again,) = (work / "again").glob("*.whl")
    if contents(again) != contents(wheel):
        raise SystemExit("The wheel that the source archive makes has other contents than the one of the repository.")
    return wheel, archive


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return {one.filename: one.CRC for one in opened.infolist() if not one.filename.endswith("/RECORD")}


def check_archives(wheel: Path, archive: Path) -> None:
    """Stop with all that is wrong in the two archives."""
    sources = run("git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES).split()
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = opened.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    with tarfile.open(archive) as opened:
        inside = [one.name.partition("/")[2] for one in opened.getmembers() if one.isfile()]
    wrong = [f"wheel, {one}" for one in [*wrong_in_wheel(names, sources), *wrong_in_metadata(metadata)]]
    wrong += [f"source archive, {one}" for one in wrong_in_sdist(inside, sources)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"ok  {wheel.name}: {len(names)} files, and {archive.name}: {len(inside)} files", flush=True)


def check_installed(python: str, wheel: Path, work: Path) -> None:
    """Install the wheel for one Python, and run the programs of the README from there."""
    shutil.rmtree(work, ignore_errors=True)
    run(python, "-m", "venv", work / "environment", clean=True)
    installed, folder = work / "environment" / "bin", work / "empty"
    folder.mkdir()
    line = (f"{wheel}[transformers,onnx]", "--constraint", ROOT / "constraints.txt")
    run(installed / "python", "-m", "pip", "install", "--quiet", *line, cwd=folder, clean=True)
    run(installed / "python", "-m", "pip", "check", cwd=folder, clean=True)
    version = wheel.name.split("-")[1]
    for name in ("yobx-flatten", "roundpipe"):
        printed = run(installed / name, "--version", cwd=folder, clean=True)
        if version not in printed:
            raise SystemExit(f"{name} --version printed {printed.strip()!r}, and the wheel is {version}")
    for package in PACKAGES:
        place = run(installed / "python", "-c", f"import {package}; print({package}.__file__)", cwd=folder, clean=True)
        if not Path(place.split()[-1]).is_relative_to(work):
            raise SystemExit(f"{package} was imported from {place.strip()}, and not from the wheel.")
    found = programs((ROOT / "README.md").read_text(encoding="utf-8"))
    for number, source in enumerate(found, 1):
        (folder / f"program_{number}.py").write_text(source, encoding="utf-8")
        run(installed / "python", f"program_{number}.py", cwd=folder, clean=True)
    print(f"ok  {run(python, '--version').strip()}: the wheel runs {len(found)} programs of the README", flush=True)
    shutil.rmtree(work)


def interpreter(version: str) -> str | None:
    """Return the program of a version of Python, also an unused one of pyenv; ``None`` if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]:
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; end with 1 and the reason if something is wrong."""
    parser = argparse.ArgumentParser("python tests/release_check.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--pythons", metavar="VERSION", nargs="*", default=PYTHONS, help="default: all three")
    parser.add_argument("--dist", metavar="FOLDER", type=Path, default=ROOT / "dist", help="default: dist")
    options = parser.parse_args(arguments)
    if changed := run("git", "status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(f"Commit first: a release is built from what is committed.\n{changed}")
    shutil.rmtree(options.dist, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        wheel, archive = build(options.dist.resolve(), Path(folder))
        check_archives(wheel, archive)
        missing = []
        for version in options.pythons:
            if python := interpreter(version):
                check_installed(python, wheel, Path(folder) / "installed")
            else:
                missing.append(version)
    if missing:
        raise SystemExit(f"Not checked, since they are not installed: Python {', '.join(missing)}")


if __name__ == "__main__":
    main()
