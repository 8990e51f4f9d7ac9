"""A file, a file with data and a folder are there whole, old or new: whatever ends the process, and whenever."""

import concurrent.futures
import errno
import itertools
import os
import pathlib
import shutil
import sys
import threading
import types

import filelock
import psutil
import pytest
import torch

from tests import fresh_process
from tests.flatten.core.files import writers
from tests.flatten.core.files.writers import write_file, write_folder, write_with_data
from yobx_flatten.core.files import scratch
from yobx_flatten.core.files.document import write_tensor_file
from yobx_flatten.core.files.scratch import (
    check_writable,
    copy_links,
    hold,
    is_folder,
    publish_files,
    publish_folder,
    scratch_for,
    settle,
    whole_file,
    write_text,
)
from yobx_flatten.errors import StoredFileError


def read(write, target):
    if write is write_folder:
        return (target / "deep" / "content").read_text(encoding="utf-8") if is_folder(target) else None
    if not target.exists():
        return None
    found = target.read_text(encoding="utf-8")
    return found if write is write_file else (target.parent / found).read_text(encoding="utf-8")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(write, target, calls):
    done = fresh_process.run("-m", writers.__name__, write.__name__, target, "new", str(calls), check=False)
    assert done.returncode in (0, 9), done.stderr
    return done.returncode == 9


def fail_renames(monkeypatch, error, *calls):
    real, count = os.replace, itertools.count(1)

    def failing(old, new):
        if next(count) in calls:
            raise error
        real(old, new)

    monkeypatch.setattr(os, "replace", failing)


def refuse_locks(monkeypatch, error):
    def refuse(self, *args, **options):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)


WRITERS = pytest.mark.parametrize("write", [write_file, write_with_data, write_folder])


@WRITERS
@pytest.mark.parametrize("first", [True, False], ids=["nothing before", "over an old one"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(write, first, tmp_path):
    for calls in range(1, 30):
        place = tmp_path / str(calls)
        place.mkdir()
        target = place / "target"
        if not first:
            write(target, "old")
        was_killed = killed(write, target, calls)
        found = read(write, target)
        assert found in ({"new", None} if first else {"old", "new"}), calls
        assert found == "new" or was_killed
        write(target, "newest")
        assert read(write, target) == "newest"
        data = {read(write_file, target)} if write is write_with_data else set()
        assert set(names(place)) == {"target", *data}, calls
        if not was_killed:
            break
    assert not was_killed
    assert calls > 3


@WRITERS
@pytest.mark.parametrize("call", [1, 2])
def test_a_rename_that_fails_leaves_the_old_one(write, call, tmp_path, monkeypatch):
    target = tmp_path / "target"
    write(target, "old")
    before = names(tmp_path)
    fail_renames(monkeypatch, OSError(5, "Input/output error"), call)
    if call == 2 and write is write_file:  # it needs one
        write(target, "new")
        assert read(write, target) == "new"
        return
    with pytest.raises(OSError, match="Input/output error"):
        write(target, "new")
    monkeypatch.undo()
    assert read(write, target) == "old"
    assert names(tmp_path) == before


def test_where_the_old_folder_cannot_get_its_name_back_the_error_says_where_it_is(tmp_path, monkeypatch):
    target = tmp_path / "target"
    write_folder(target, "old")
    fail_renames(monkeypatch, OSError(30, "Read-only file system"), *range(2, 20))
    with pytest.raises(
        OSError, match=r"the former contents of .*target are in .*\.target\.writing-\w+/old until target is written"
    ):
        write_folder(target, "new")
    with pytest.raises(StoredFileError, match=r"A process is replacing .*target.*\.target\.writing-\w+/old"):
        is_folder(target)
    monkeypatch.undo()
    assert read(write_folder, target) == "new"  # it was complete
    assert names(tmp_path) == ["target"]


def test_what_is_being_written_is_left_alone(tmp_path):
    target = tmp_path / "target"
    with scratch_for(target) as ours:
        fresh_process.run("-m", writers.__name__, "write_folder", target, "theirs")
        (ours / "deep").mkdir()
        (ours / "deep" / "content").write_text("ours", encoding="utf-8")
        assert read(write_folder, target) == "theirs"
        publish_folder(ours, target)
    assert read(write_folder, target) == "ours"
    assert names(tmp_path) == ["target"]


def test_threads_that_write_to_one_name_leave_one_of_their_files(tmp_path):
    target = tmp_path / "target"

    def write(number):
        for turn in range(10):
            write_file(target, f"{number}.{turn}" * 1000)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert target.read_text(encoding="utf-8") in {f"{number}.9" * 1000 for number in range(4)}
    assert names(tmp_path) == ["target"]


def test_the_lock_of_a_hidden_folder_goes_last(tmp_path, monkeypatch):
    """Another thread can make and hold the lock again at once, and would read lists that are just being removed."""
    own, seen = shutil.rmtree, []

    def rmtree(path, **options):
        if pathlib.Path(path).name == "lock":
            seen.append(names(pathlib.Path(path).parent))
        own(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    write_file(tmp_path / "target", "text")
    assert seen == [["lock"]]
    assert names(tmp_path) == ["target"]


def test_lists_of_a_stranger_remove_nothing_of_the_user(tmp_path):
    """A hidden folder may come with an archive; what it lists is removed where it has the name of such data only."""
    (tmp_path / "mine.data").write_text("mine", encoding="utf-8")
    (tmp_path / "target.data").write_text("data", encoding="utf-8")
    laid = tmp_path / "runs" / ".target.writing-xxxx"
    (laid / "new").mkdir(parents=True)
    (laid / "new" / "target").write_text("", encoding="utf-8")
    listed = ["../mine.data", "../target.data", "mine.data", "", ".", "..", str(tmp_path / "mine.data")]
    (laid / "others").write_text("\n".join(listed), encoding="utf-8")
    settle(laid.parent / "target")
    assert names(tmp_path) == ["mine.data", "runs", "target.data"]
    assert names(laid.parent) == []


def test_a_link_is_no_leftover(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").mkdir()
    (tmp_path / ".target.writing-1").symlink_to(tmp_path / "elsewhere")
    assert not is_folder(tmp_path / "target")
    assert names(tmp_path / "elsewhere") == ["old"]


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    real = scratch.flush_tree
    monkeypatch.setattr(scratch, "flush_tree", lambda folder: (events.append("flush"), real(folder)))
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("name"), replace(old, new)))
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("fsync"), fsync(number)))
    write_file(tmp_path / "target", "x")
    assert events[0] == "flush"
    assert "fsync" in events[: events.index("name")]
    assert events[-1] == "fsync"


def test_data_have_another_name_each_time(tmp_path):
    """Two writers cannot remove each other's data: `NAME.data` is the first file's, and no later one takes it."""
    target, seen = tmp_path / "target", set()
    for text in "abc":
        write_with_data(target, text)
        seen.add(target.read_text(encoding="utf-8"))
        assert names(tmp_path) == ["target", target.read_text(encoding="utf-8")]
    assert len(seen) == 3
    assert "target.data" in seen


def test_without_a_lock_nothing_is_written_and_nothing_stays(tmp_path, monkeypatch):
    write_file(tmp_path / "target", "old")
    refuse_locks(monkeypatch, OSError(24, "Too many open files"))
    with pytest.raises(OSError, match="Too many open files"):
        write_file(tmp_path / "target", "new")
    assert names(tmp_path) == ["target"]
    assert read(write_file, tmp_path / "target") == "old"


def test_a_leftover_that_cannot_be_locked_is_left_for_the_next_one(tmp_path, monkeypatch):
    (tmp_path / ".target.writing-1" / "old").mkdir(parents=True)
    with monkeypatch.context() as patched:
        refuse_locks(patched, OSError(30, "Read-only file system"))
        with pytest.raises(StoredFileError, match=r"The former contents are in .*\.target\.writing-1/old"):
            is_folder(tmp_path / "target")
    assert is_folder(tmp_path / "target")
    assert names(tmp_path) == ["target"]


def test_files_that_are_read_only_are_flushed(tmp_path):
    """A folder of a tokenizer may be read-only, and so are copies of its files. Root may write to them: not as root."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "content").write_text("x", encoding="utf-8")
    (folder / "content").chmod(0o444)
    tmp_path.chmod(0o755)
    program = (
        "import os, pathlib\n"
        "from yobx_flatten.core.files.scratch import flush_tree\n"
        f"os.chdir({str(tmp_path)!r})\n"  # folders above are the user's own
        "os.getuid() or os.setuid(65534)\n"
        "flush_tree(pathlib.Path('folder'))\n"
    )
    fresh_process.run("-c", program)


def test_a_text_goes_to_what_is_not_a_file_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text(encoding="utf-8")))
    reader.start()
    write_text(tmp_path / "pipe", "text")
    reader.join()
    assert found == ["text"]
    assert names(tmp_path) == ["pipe"]


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """For a moment it has no lock, as the leftover of a killed process."""
    acquire, taken = filelock.FileLock.acquire, []

    def acquire_too_late(lock, *args, **kwargs):
        if not taken:
            taken.append(lock.lock_file)
            (folder,) = tmp_path.glob(".text.writing-*")
            shutil.rmtree(folder)
            raise FileNotFoundError(2, "No such file or directory", lock.lock_file)
        return acquire(lock, *args, **kwargs)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_too_late)
    write_text(tmp_path / "text", "new")
    assert taken
    assert names(tmp_path) == ["text"]
    assert (tmp_path / "text").read_text() == "new"


def test_a_file_of_a_block_is_there_whole_or_not_at_all(tmp_path):
    target = tmp_path / "picture.svg"
    with whole_file(target) as file:
        file.write_text("first", encoding="utf-8")
        assert file.suffix == ".svg"  # libraries choose the form by it
        assert not target.exists()

    def fail():
        with whole_file(target) as file:
            file.write_text("half", encoding="utf-8")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert target.read_text(encoding="utf-8") == "first"
    assert names(tmp_path) == ["picture.svg"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with scratch_for(tmp_path / "folder") as work:
            (work / "deep").mkdir()
            write_tensor_file(work / "deep" / "a.safetensors", {"a": torch.ones(2)})
            (work / "private").touch(0o600)
            (work / "run").touch()
            (work / "run").chmod(0o755)
            (work / "read").touch()
            (work / "read").chmod(0o444)
            publish_folder(work, tmp_path / "folder")
        with scratch_for(tmp_path / "b.safetensors") as work:
            write_tensor_file(work / "b.safetensors", {"a": torch.ones(2)})
            publish_files(work, tmp_path / "b.safetensors")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    usual = 0o666 & ~umask
    expected = {"a.safetensors": usual, "b.safetensors": usual, "private": usual, "run": 0o755, "read": 0o444}
    assert modes == expected


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """safetensors has a class of its own for it."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no full disk here")
    program = (
        "import pathlib, resource, signal, torch\n"
        "from yobx_flatten.core.files.document import write_tensor_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        f"    write_tensor_file(pathlib.Path({str(tmp_path / 'a.safetensors')!r}), {{'a': torch.ones(10000)}})\n"
        "except OSError as error:\n"
        "    print(type(error).__name__, error.errno)\n"
    )
    assert fresh_process.run("-c", program).stdout.split() == ["OSError", str(errno.EFBIG)]


def test_a_place_that_cannot_be_written_is_found_before_and_nothing_stays(tmp_path):
    (tmp_path / "file").touch()
    for target in ("file/a", "file/a/b/c"):
        with pytest.raises(OSError, match="it cannot be written: file is not a folder"):
            check_writable(tmp_path / target)
    with pytest.raises(OSError, match="it cannot be written"):
        check_writable(tmp_path / "file", in_parent=False)
    for target in ("file", "a", "a/b/c"):
        check_writable(tmp_path / target)
    assert names(tmp_path) == ["file"]


def test_a_folder_that_is_a_mount_point_is_refused_before_it_would_be_replaced(tmp_path, monkeypatch):
    """A rename cannot replace a mount point; files inside of it can be written."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    found = [types.SimpleNamespace(mountpoint="/"), types.SimpleNamespace(mountpoint=str(tmp_path.resolve() / "disk"))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)  # a name of psutil's
    for name in ("disk", "link"):
        with pytest.raises(OSError, match="it is a mount point") as refused:
            check_writable(tmp_path / name)
        assert refused.value.errno == errno.EBUSY
        check_writable(tmp_path / name, in_parent=False)
        check_writable(tmp_path / name / "inside")
    monkeypatch.undo()
    check_writable(tmp_path)
    if sys.platform == "linux":  # where a disk is mounted that is sure to be there
        with pytest.raises(OSError, match="it is a mount point"):
            check_writable("/proc")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_folder_is_copied_by_links_where_the_disk_has_them(tmp_path, monkeypatch, has_links):

    def refused(*args, **options):
        raise OSError(errno.EPERM, "no links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refused)
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "deep" / ".x.writing-1").mkdir(parents=True)
    (folder / "deep" / "x").write_text("x", encoding="utf-8")
    (folder / "link").symlink_to("deep/x")
    copy_links(folder, other)
    assert sorted(path.relative_to(other).as_posix() for path in other.rglob("*")) == ["deep", "deep/x", "link"]
    assert (other / "link").is_symlink()
    assert os.path.samefile(folder / "deep" / "x", other / "deep" / "x") == has_links


def test_a_folder_is_held_once(tmp_path):
    let_go = hold(tmp_path / ".writing")
    assert hold(tmp_path / ".writing") is None
    let_go()
    assert names(tmp_path) == []
    again = hold(tmp_path / ".writing")
    assert again is not None
    again()
