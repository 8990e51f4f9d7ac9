"""Files of text, JSON lines, folders of `datasets`: what is read, in which order, and what is refused."""

import importlib.util
import json
import shutil
import subprocess

import pytest

from roundpipe_runtime.fine_tune import FineTuneError
from roundpipe_runtime.fine_tune.data import text_files
from roundpipe_runtime.fine_tune.data.text_files import END, find_texts, read_texts
from yobx_flatten import MissingDependencyError


def documents(paths, **options):
    """The texts of all documents, each in one piece."""
    found, pieces = [], []
    for piece in read_texts(paths, **options):
        if piece is END:
            found.append("".join(pieces))
            pieces = []
        else:
            pieces.append(piece)
    assert not pieces
    return found


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def test_a_file_of_one_line_is_read_once(tmp_path):
    """Text without a line break was copied for each of its pieces: 41 s for 64 MB; a line of pieces comes whole."""
    text = "è " * 2**20
    (tmp_path / "line.txt").write_text(text + "\nx\u2028y", encoding="utf-8")
    assert list(read_texts([tmp_path / "line.txt"])) == [text + "\n", "x\u2028y", END]


def test_a_file_of_text_is_one_document(tmp_path):
    """With its line ends as they are; a mark at the beginning is no text."""
    path = write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n\nthree")
    assert documents([path]) == ["one\r\ntwo\n\nthree"]


def test_a_long_file_comes_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    """So that a tokenizer never holds all of it; together they are the file."""
    monkeypatch.setattr(text_files, "_PIECE", 10)
    text = "".join(f"line {number}\n" for number in range(20)) + "a line that is longer than a piece\nthe end"
    path = write(tmp_path / "long.md", text)
    pieces = list(read_texts([path]))
    assert pieces[-1] is END
    assert "".join(pieces[:-1]) == text
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces[:-2])


def test_each_line_of_json_is_a_document(tmp_path):
    """Empty lines are none; the field can have another name; halves of characters become signs."""
    lines = ['{"body": "one\\n"}', "", '{"body": "", "id": 3}', '{"body": "\\ud800!"}']
    path = write(tmp_path / "mails.jsonl", "\n".join(lines) + "\n")
    assert documents([path], field="body") == ["one\n", "", "?!"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", 'bad.jsonl:2 is not JSON. Each line must be an object like {"text": "..."}'),
        ("[1]", "bad.jsonl:2 is a list. Each line"),
        ('{"body": "x", "id": 1}', "bad.jsonl:2 has no text in 'text'. Its fields: body, id. Name one: --field NAME"),
        ('{"text": 3}', "bad.jsonl:2 has no text in 'text', but a int: --field NAME"),
        ("{}", "Its fields: nothing"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, words):
    """By file and number."""
    path = write(tmp_path / "bad.jsonl", f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(FineTuneError) as caught:
        documents([path])
    assert words in str(caught.value)


def test_a_folder_stands_for_the_texts_in_it(tmp_path):
    """In the order of their names, however deep; what is no text is passed over."""
    for name in ("b.txt", "a/z.md", "a/b.jsonl", "picture.png", "noending"):
        write(tmp_path / "corpus" / name, '{"text": "x"}')
    found = find_texts([tmp_path / "corpus"])
    assert [path.relative_to(tmp_path / "corpus").as_posix() for path in found] == ["a/b.jsonl", "a/z.md", "b.txt"]


def test_patterns_and_files_that_are_named_twice(tmp_path, monkeypatch):
    """`**` goes through folders; a file is read once, where it was named first; a file without an ending is text."""
    for name in ("one.txt", "deep/two.txt", "LICENSE"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    found = find_texts(["LICENSE", "**/*.txt", "one.txt", tmp_path / "deep"])
    assert [path.name for path in found] == ["LICENSE", "two.txt", "one.txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.txt", "There is no file nowhere.txt."),
        ("*.md", "There is no file *.md."),
        ("paper.pdf", "paper.pdf ends in .pdf, not in one of .txt"),
        ("empty", "empty contains no text: no file in it ends in .txt"),
    ],
)
def test_what_stands_for_no_text_is_refused(tmp_path, monkeypatch, name, words):
    """With the name that was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "paper.pdf").touch()
    with pytest.raises(FineTuneError) as caught:
        find_texts([name])
    assert words in str(caught.value)


def test_nothing_named_is_refused():
    """With the option."""
    with pytest.raises(FineTuneError, match="--text FILE"):
        find_texts([])


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    """With the line that repairs it, if it is text."""
    path = tmp_path / "latin.txt"
    path.write_bytes("für".encode("latin1"))
    with pytest.raises(FineTuneError, match=r"iconv -f LATIN1 -t UTF-8 .*latin.txt > .*latin.utf8.txt"):
        documents([path])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_line_that_repairs_text_of_another_encoding_does(tmp_path, name, encoding):
    """Run by the shell, it makes a file that is read; with the mark of its encoding and without."""
    path = tmp_path / name
    path.write_bytes('{"text": "größer und größer"}\n'.encode(encoding))
    with pytest.raises(FineTuneError, match="is not UTF-8, but perhaps UTF-") as caught:
        documents([path])
    if shutil.which("iconv") is None:
        pytest.skip("iconv is not installed")
    if encoding != "utf-32":  # without a mark that iconv knows on all systems
        subprocess.run(str(caught.value).partition("Convert it: ")[2], shell=True, check=True)
        assert "größer und" in documents([tmp_path / name.replace("a.", "a.utf8.")])[0]


class TestDatasets:
    """Folders that the library writes."""

    @pytest.fixture
    def datasets(self):
        found = pytest.importorskip("datasets", reason="datasets is not installed")
        found.disable_progress_bars()
        return found

    def test_each_row_is_a_document(self, tmp_path, datasets):
        """A folder of one data set, among files."""
        datasets.Dataset.from_dict({"body": ["one", "two"], "id": [1, 2]}).save_to_disk(tmp_path / "saved")
        plain = write(tmp_path / "plain.txt", "three")
        found = find_texts([tmp_path / "saved", plain])
        assert documents(found, field="body") == ["one", "two", "three"]

    def test_of_several_data_sets_the_one_for_training_is_read(self, tmp_path, datasets):
        """Any other can be named itself."""
        parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
        assert documents(find_texts([tmp_path / "both"])) == ["train"]
        assert documents(find_texts([tmp_path / "both" / "test"])) == ["test"]
        datasets.DatasetDict({"a": parts["test"], "b": parts["train"]}).save_to_disk(tmp_path / "other")
        with pytest.raises(FineTuneError, match=r"none is called train\. Name one: .*a, .*b"):
            documents(find_texts([tmp_path / "other"]))

    def test_another_field_is_refused_with_those_that_there_are(self, tmp_path, datasets):
        """Before the first row is read."""
        datasets.Dataset.from_dict({"body": ["one"], "id": [1]}).save_to_disk(tmp_path / "saved")
        with pytest.raises(FineTuneError, match=r"has no text in 'text'. Its fields: body, id. Name one: --field NAME"):
            documents(find_texts([tmp_path / "saved"]))

    @pytest.mark.parametrize("kind", ["parquet", "csv"])
    def test_rows_of_a_table_are_documents(self, tmp_path, datasets, kind):
        """Their text comes as it was written, also where a table could mean a missing value."""
        rows = datasets.Dataset.from_dict({"body": ["one\ntwo", "NA"], "id": [1, 2]})
        getattr(rows, f"to_{kind}")(tmp_path / f"a.{kind}")
        assert documents(find_texts([tmp_path / f"a.{kind}"]), field="body") == ["one\ntwo", "NA"]

    def test_a_damaged_table_is_refused(self, tmp_path):
        path = write(tmp_path / "a.parquet", "PAR1PAR1")
        with pytest.raises(FineTuneError, match=r"a\.parquet cannot be read: .*Parquet"):
            documents([path])

    def test_a_damaged_folder_is_refused(self, tmp_path, datasets):
        """In one line."""
        datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "state.json").write_text("{")
        with pytest.raises(FineTuneError, match="saved cannot be read"):
            documents(find_texts([tmp_path / "saved"]))


def test_without_the_library_its_folders_are_refused(tmp_path, monkeypatch):
    """With the line that installs it."""
    for name in ("state.json", "dataset_info.json"):
        write(tmp_path / "saved" / name, json.dumps({}))
    found = find_texts([tmp_path / "saved"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[data\]'"):
        documents(found)
