"""Writers of a file, of a file with its data and of a folder; as a program, one of them in a process that is killed.

    python -m tests.flatten.core.files.writers write_file TARGET TEXT [CALLS]

writes a text, and ends after so many calls that change names as by `kill -9`, with status 9.
"""

import os
import sys
from pathlib import Path

from yobx_flatten.core.files.scratch import data_path, publish_files, publish_folder, scratch_for


def write_file(target, text):
    with scratch_for(target) as folder:
        (folder / target.name).write_text(text, encoding="utf-8")
        publish_files(folder, target)


def write_with_data(target, text):
    """The file holds the name of its data, as an ONNX file does."""
    with scratch_for(target) as folder:
        data = data_path(folder / target.name, target)
        data.write_text(text, encoding="utf-8")
        (folder / target.name).write_text(data.name, encoding="utf-8")
        before = {target.read_text(encoding="utf-8")} if target.exists() else set()
        publish_files(folder, target, before)


def write_folder(target, text):
    with scratch_for(target) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "content").write_text(text, encoding="utf-8")
        publish_folder(folder, target)


WRITERS = {write.__name__: write for write in (write_file, write_with_data, write_folder)}


def die_after(calls):
    """End this process after so many calls that change names."""

    def dying(real):
        def call(*given, **options):
            nonlocal calls
            real(*given, **options)
            calls -= 1
            if not calls:
                os._exit(9)

        return call

    os.replace, os.unlink, os.mkdir = dying(os.replace), dying(os.unlink), dying(os.mkdir)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        die_after(int(sys.argv[4]))
    WRITERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
