"""Tokens in a line, cut into rows, some of them held out."""

import tracemalloc

import pytest
import torch

from roundpipe_runtime.fine_tune import ByteTokenizer, FineTuneError, make_blocks, read_blocks
from roundpipe_runtime.fine_tune.data import text_files
from roundpipe_runtime.fine_tune.data.text_files import END, pack


class NoEnd(ByteTokenizer):
    """Numbers without one for the end of a text."""

    eos_token_id = None


def test_a_tokenizer_without_an_end_leaves_it_out():
    assert pack(["a", END, "b", END], NoEnd()).tolist() == [100, 101]


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_documents_stand_in_a_line_with_an_end_behind_each_in_groups_of_any_size(monkeypatch, texts):
    """Texts are encoded together; an empty document leaves nothing."""
    monkeypatch.setattr(text_files, "_TEXTS", texts)
    pieces = ["ab", "c", END, END, "", END, "d", END, "e", "", "f", END]
    found = pack(pieces, ByteTokenizer())
    assert found.dtype == torch.int32
    assert found.tolist() == [100, 101, 102, 1, 103, 1, 104, 105, 1]


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
    """At least one row of each kind, none in both, the same ones for the same seed."""
    tokens = torch.arange(20 * 4, dtype=torch.int32)
    made = make_blocks(tokens, length=4, eval_share=share, seed=3)
    assert len(made.held_out) == held_out
    assert sorted([*made.training.tolist(), *made.held_out.tolist()]) == list(range(20))
    assert make_blocks(tokens, length=4, eval_share=share, seed=3).held_out.tolist() == made.held_out.tolist()


def test_another_seed_holds_other_rows_out():
    tokens = torch.arange(400, dtype=torch.int32)
    choices = {tuple(make_blocks(tokens, length=4, eval_share=0.1, seed=seed).held_out.tolist()) for seed in range(5)}
    assert len(choices) == 5


def test_the_digest_tells_texts_and_lengths_apart():
    tokens = torch.arange(24, dtype=torch.int32)
    others = [make_blocks(tokens, length=3), make_blocks(tokens + 1, length=4), make_blocks(tokens[:20], length=4)]
    own = make_blocks(tokens, length=4)
    assert make_blocks(tokens.clone(), length=4).digest == own.digest
    assert own.digest not in [other.digest for other in others]


@pytest.mark.parametrize(("count", "share", "words"), [(5, 0.0, "one row of 6"), (7, 0.5, "two rows of 6")])
def test_too_little_text_is_refused(count, share, words):
    """With the length that would do."""
    with pytest.raises(FineTuneError, match=f"has {count} tokens, which do not fill {words}.*--length 2"):
        make_blocks(torch.arange(count, dtype=torch.int32), length=6, eval_share=share)


def test_files_become_rows(tmp_path):
    """In the order of their names, whatever order they are written in."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    made = read_blocks([tmp_path], ByteTokenizer(), length=4)
    assert made.tokens.tolist() == [[100, 100, 100, 1], [101, 101, 101, 1]]


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    """Before a model looks it up in memory that is not there."""
    (tmp_path / "a.txt").write_text("abcdefgh")
    with pytest.raises(FineTuneError, match="vocabulary of 105, but the tokenizer bytes makes the token 107"):
        read_blocks([tmp_path / "a.txt"], ByteTokenizer(), length=4, vocab_size=105)
    assert read_blocks([tmp_path / "a.txt"], ByteTokenizer(), length=4, vocab_size=108).left_over == 1
