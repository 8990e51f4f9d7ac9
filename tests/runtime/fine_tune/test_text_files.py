"""Files of text, JSON lines, folders of `datasets`: what is read, what is refused, and tokens cut into rows."""

import importlib.util
import json
import shutil
import subprocess
import tracemalloc

import pytest
import torch

from roundpipe_runtime.fine_tune import ByteTokenizer, FineTuneError, make_blocks, read_blocks
from roundpipe_runtime.fine_tune.data import text_files
from roundpipe_runtime.fine_tune.data.text_files import END, find_texts, pack, read_texts
from yobx_flatten import MissingDependencyError


def documents(paths, **options):
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


def test_a_file_of_text_is_one_document(tmp_path):
    """Line ends stay, a mark at the beginning goes. A long line was copied for each of its pieces: 41 s for 64 MB."""
    assert documents([write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n\nthree")]) == ["one\r\ntwo\n\nthree"]
    text = "è " * 2**20
    assert list(read_texts([write(tmp_path / "line.txt", text + "\nx\u2028y")])) == [text + "\n", "x\u2028y", END]


def test_a_long_file_comes_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_PIECE", 10)
    text = "".join(f"line {number}\n" for number in range(20)) + "a line that is longer than a piece\nthe end"
    pieces = list(read_texts([write(tmp_path / "long.md", text)]))
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
    path = write(tmp_path / "bad.jsonl", f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(FineTuneError) as caught:
        documents([path])
    assert words in str(caught.value)


def test_folders_patterns_and_files_that_are_named_twice(tmp_path, monkeypatch):
    """Texts of a folder are sorted by name, others passed over; a file is read once, where it was named first."""
    for name in ("b.txt", "a/z.md", "a/b.jsonl", "picture.png", "LICENSE"):
        write(tmp_path / name, '{"text": "x"}')
    monkeypatch.chdir(tmp_path)
    for names, expected in (
        ([tmp_path], ["a/b.jsonl", "a/z.md", "b.txt"]),
        (["LICENSE", "**/*.md", "b.txt", tmp_path / "a", "*.txt"], ["LICENSE", "a/z.md", "b.txt", "a/b.jsonl"]),
    ):
        assert [path.relative_to(tmp_path).as_posix() for path in find_texts(names)] == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.txt", "There is no file nowhere.txt."),
        ("*.md", "There is no file *.md."),
        ("paper.pdf", "paper.pdf ends in .pdf, not in one of .txt"),
        ("empty", "empty contains no text: no file in it ends in .txt"),
        (None, "Name a text (--text FILE)"),
    ],
)
def test_what_stands_for_no_text_is_refused(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "paper.pdf").touch()
    with pytest.raises(FineTuneError) as caught:
        find_texts([] if name is None else [name])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("a.txt", "latin1"),
        *((name, form) for name in ("a.txt", "a.jsonl") for form in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
    ],
)
def test_the_line_that_repairs_text_of_another_encoding_does(tmp_path, name, encoding):
    """Run by the shell, it makes a file that is read; with the mark of its encoding and without."""
    path = tmp_path / name
    path.write_bytes('{"text": "größer und größer"}\n'.encode(encoding))
    with pytest.raises(
        FineTuneError, match=r"is not UTF-8(, but perhaps UTF-| \(.*iconv -f LATIN1 -t UTF-8 )"
    ) as caught:
        documents([path])
    if shutil.which("iconv") is None:
        pytest.skip("iconv is not installed")
    if encoding != "utf-32":  # without a mark that iconv knows on all systems
        subprocess.run(str(caught.value).partition("Convert it: ")[2], shell=True, check=True)
        assert "größer und" in documents([tmp_path / name.replace("a.", "a.utf8.")])[0]


class TestDatasets:
    @pytest.fixture
    def datasets(self):
        found = pytest.importorskip("datasets", reason="datasets is not installed")
        found.disable_progress_bars()
        return found

    def test_each_row_is_a_document(self, tmp_path, datasets):
        """A folder of one data set, among files."""
        datasets.Dataset.from_dict({"body": ["one", "two"], "id": [1, 2]}).save_to_disk(tmp_path / "saved")
        found = find_texts([tmp_path / "saved", write(tmp_path / "plain.txt", "three")])
        assert documents(found, field="body") == ["one", "two", "three"]
        with pytest.raises(FineTuneError, match=r"has no text in 'text'. Its fields: body, id. Name one: --field NAME"):
            documents(found)

    def test_of_several_data_sets_the_one_for_training_is_read(self, tmp_path, datasets):
        """Any other can be named itself."""
        parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
        assert documents(find_texts([tmp_path / "both"])) == ["train"]
        assert documents(find_texts([tmp_path / "both" / "test"])) == ["test"]
        datasets.DatasetDict({"a": parts["test"], "b": parts["train"]}).save_to_disk(tmp_path / "other")
        with pytest.raises(FineTuneError, match=r"none is called train\. Name one: .*a, .*b"):
            documents(find_texts([tmp_path / "other"]))

    @pytest.mark.parametrize("kind", ["parquet", "csv"])
    def test_rows_of_a_table_are_documents(self, tmp_path, datasets, kind):
        """Their text comes as it was written, also where a table could mean a missing value."""
        rows = datasets.Dataset.from_dict({"body": ["one\ntwo", "NA"], "id": [1, 2]})
        getattr(rows, f"to_{kind}")(tmp_path / f"a.{kind}")
        assert documents(find_texts([tmp_path / f"a.{kind}"]), field="body") == ["one\ntwo", "NA"]

    def test_a_damaged_table_or_folder_is_refused(self, tmp_path, datasets):
        path = write(tmp_path / "a.parquet", "PAR1PAR1")
        with pytest.raises(FineTuneError, match=r"a\.parquet cannot be read: .*Parquet"):
            documents([path])
        datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "state.json").write_text("{")
        with pytest.raises(FineTuneError, match="saved cannot be read"):
            documents(find_texts([tmp_path / "saved"]))


def test_without_the_library_its_folders_are_refused(tmp_path, monkeypatch):
    for name in ("state.json", "dataset_info.json"):
        write(tmp_path / "saved" / name, json.dumps({}))
    found = find_texts([tmp_path / "saved"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[data\]'"):
        documents(found)


# -- tokens in a line, cut into rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_documents_stand_in_a_line_with_an_end_behind_each_in_groups_of_any_size(monkeypatch, texts):
    """Texts are encoded together; an empty document leaves nothing, and an end that the tokenizer lacks is left out."""
    monkeypatch.setattr(text_files, "_TEXTS", texts)
    pieces = ["ab", "c", END, END, "", END, "d", END, "e", "", "f", END]
    found = pack(pieces, ByteTokenizer())
    assert found.dtype == torch.int32
    assert found.tolist() == [100, 101, 102, 1, 103, 1, 104, 105, 1]
    monkeypatch.setattr(ByteTokenizer, "eos_token_id", None)
    assert pack(pieces, ByteTokenizer()).tolist() == [100, 101, 102, 103, 104, 105]


def test_tokens_are_held_in_four_bytes_each():
    """Numbers of Python would take 36; a group of texts at a time is all that is there twice."""
    text = "a line of text\n" * 4096
    tracemalloc.start()
    try:
        found = pack((text for _ in range(64)), ByteTokenizer())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.numel() == 64 * len(text)
    assert most < 6 * found.numel() + 8 * 2**20


def test_rows_are_cut_one_behind_the_other():
    """What fills no row is left over; without a share all rows are learnt from."""
    made = make_blocks(torch.arange(11, dtype=torch.int32), length=3)
    assert made.tokens.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert made.training.tolist() == [0, 1, 2]
    assert made.held_out.tolist() == []
    assert (made.left_over, made.length) == (2, 3)


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (0.001, 1), (0.1, 2), (0.5, 10), (0.99, 19)])
def test_a_share_is_held_out(share, held_out):
    """At least one row of each kind, none in both, the same ones for the same seed; another seed holds others out."""
    tokens = torch.arange(20 * 4, dtype=torch.int32)
    made = make_blocks(tokens, length=4, eval_share=share, seed=3)
    assert len(made.held_out) == held_out
    assert sorted([*made.training.tolist(), *made.held_out.tolist()]) == list(range(20))
    assert make_blocks(tokens, length=4, eval_share=share, seed=3).held_out.tolist() == made.held_out.tolist()
    if share == 0.5:
        halves = {tuple(make_blocks(tokens, length=4, eval_share=0.5, seed=one).held_out.tolist()) for one in range(5)}
        assert len(halves) == 5


def test_the_digest_tells_texts_and_lengths_apart():
    tokens = torch.arange(24, dtype=torch.int32)
    others = [make_blocks(tokens, length=3), make_blocks(tokens + 1, length=4), make_blocks(tokens[:20], length=4)]
    own = make_blocks(tokens, length=4)
    assert make_blocks(tokens.clone(), length=4).digest == own.digest
    assert own.digest not in [other.digest for other in others]


@pytest.mark.parametrize(("count", "share", "words"), [(5, 0.0, "one row of 6"), (7, 0.5, "two rows of 6")])
def test_too_little_text_is_refused(count, share, words):
    with pytest.raises(FineTuneError, match=f"has {count} tokens, which do not fill {words}.*--length 2"):
        make_blocks(torch.arange(count, dtype=torch.int32), length=6, eval_share=share)


def test_files_become_rows_of_tokens_below_the_vocabulary(tmp_path):
    """A larger token is refused before a model looks it up in memory that is not there."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    made = read_blocks([tmp_path], ByteTokenizer(), length=4)
    assert made.tokens.tolist() == [[100, 100, 100, 1], [101, 101, 101, 1]]
    (tmp_path / "a.txt").write_text("abcdefgh")
    with pytest.raises(FineTuneError, match=r"vocabulary of 105 tokens, .* bytes produces the token id 107"):
        read_blocks([tmp_path / "a.txt"], ByteTokenizer(), length=4, vocab_size=105)
    assert read_blocks([tmp_path / "a.txt"], ByteTokenizer(), length=4, vocab_size=108).left_over == 1
