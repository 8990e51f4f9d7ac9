"""Text to bytes to numbers and back, with the numbers of ByT5."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from roundpipe_runtime.fine_tune import ByteTokenizer

# All of Unicode that UTF-8 can hold.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
@example("")
@example("\x00\x7f\x80\uffff\U0010ffff e\u0301 \u200d \r\n")
def test_any_text_comes_back(text):
    """Every character of Unicode, line ends and zeros included."""
    (ids,) = ByteTokenizer().encode([text])
    assert ids.dtype == torch.int32
    assert ByteTokenizer().decode(ids) == text


@given(st.binary())
def test_any_byte_is_a_number_of_its_own(data):
    """Three above the byte, below the size of the vocabulary; half characters are decoded, too."""
    ids = [byte + 3 for byte in data]
    assert ByteTokenizer().decode(ids) == data.decode("utf-8", "replace")
    assert all(number < ByteTokenizer.vocab_size for number in ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))
def test_the_numbers_are_those_of_byt5(text):
    """As the class of transformers has them, where no special token is spelt out."""
    transformers = pytest.importorskip("transformers")
    expected = transformers.ByT5Tokenizer(extra_ids=0)(text, add_special_tokens=False)["input_ids"]
    assert ByteTokenizer().encode([text])[0].tolist() == expected


def test_several_texts_stay_apart():
    """One row of numbers for each, an empty one as well."""
    assert [ids.tolist() for ids in ByteTokenizer().encode(["a", "", "bc"])] == [[100], [], [101, 102]]


def test_special_numbers_are_no_text():
    """Padding, the end, and numbers beyond the bytes are left out."""
    assert ByteTokenizer().decode([0, 100, 1, 2, 259, 1000]) == "a"


def test_transformers_reads_what_is_saved(tmp_path):
    """`AutoTokenizer` finds the class of bytes in the folder."""
    transformers = pytest.importorskip("transformers")
    ByteTokenizer().save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("né", add_special_tokens=False)["input_ids"] == [113, 198, 172]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 0)
