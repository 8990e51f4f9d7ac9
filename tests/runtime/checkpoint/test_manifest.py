"""Tests of roundpipe_runtime.checkpoint.folder: every kind of damage is seen."""

import hashlib
import json

import pytest

from roundpipe_runtime.checkpoint import CheckpointError, DamagedCheckpointError
from roundpipe_runtime.checkpoint.folder import MANIFEST, is_complete, verify, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.bin").write_bytes(b"first file")
    (tmp_path / "two.bin").write_bytes(bytes(1000))
    write_manifest(tmp_path)
    return tmp_path


def test_the_manifest_holds_sizes_and_sha256(folder):
    """`sha256sum` gives the same."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files["one.bin"] == {"bytes": 10, "sha256": hashlib.sha256(b"first file").hexdigest()}
    assert set(files) == {"one.bin", "two.bin"}


@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen(folder, place, bit):
    """The length is right, so only the checksum tells."""
    content = bytearray((folder / "two.bin").read_bytes())
    content[place] ^= 1 << bit
    (folder / "two.bin").write_bytes(content)
    assert is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=r"two\.bin was changed after it was written"):
        verify(folder)


def cut_short(folder):
    (folder / "two.bin").write_bytes(bytes(999))


def remove_file(folder):
    (folder / "one.bin").unlink()


def remove_manifest(folder):
    (folder / MANIFEST).unlink()


def cut_manifest_short(folder):
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])


def empty_manifest(folder):
    (folder / MANIFEST).write_text("")


def other_json(folder):
    (folder / MANIFEST).write_text('{"format": 1, "files": ["one.bin"]}')


def path_outside(folder):
    (folder / MANIFEST).write_text('{"format": 1, "files": {"../one.bin": {"bytes": 1, "sha256": ""}}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"two\.bin has 999 bytes, but 1000 were written"),
        (remove_file, r"names the file 'one\.bin', which does not exist"),
        (remove_manifest, r"checkpoint\.json is missing"),
        (cut_manifest_short, r"checkpoint\.json is damaged: it is not JSON"),
        (empty_manifest, r"checkpoint\.json is damaged: it is empty"),
        (other_json, r"checkpoint\.json is damaged: "),
        (path_outside, r"names the file '\.\./one\.bin', which is not in the folder"),
    ],
)
def test_what_is_missing_is_named(folder, damage, message):
    damage(folder)
    assert not is_complete(folder)
    with pytest.raises(DamagedCheckpointError, match=message):
        verify(folder)


def test_a_newer_format_is_not_damage(folder):
    """Falling back to an older checkpoint would lose work that is there."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2") as caught:
        verify(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)
