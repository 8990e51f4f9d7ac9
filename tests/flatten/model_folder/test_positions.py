"""A text that is longer than a model's table of positions is refused in one line, before a file fails on it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from yobx_flatten import InvalidArgumentError, export_folder, open_generator
from yobx_flatten.model_folder.pieces.text import positions_of
from yobx_flatten.model_folder.source.configuration import small_model


@pytest.mark.parametrize(
    ("name", "has_table"),
    [
        ("gpt2", True),
        ("opt", True),
        ("bart", True),
        ("whisper", True),
        ("llama", False),
        ("t5", False),
        ("bloom", False),
    ],
)
def test_whether_positions_end_is_found_by_calling_the_model(name, has_table):
    """A table has a last row; rotations, distances and slopes go on."""
    model = small_model(name)
    config = model.config.get_text_config(decoder=True)
    stated = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    assert positions_of(model, is_large=False) == (stated if has_table else None)


def test_a_large_model_without_positions_among_its_inputs_is_not_asked():
    """The call would be as long as the table."""
    assert positions_of(small_model("bart"), is_large=True) is None
    assert positions_of(small_model("gpt2"), is_large=True) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
    tokens = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    config = GPT2Config(**sizes, **tokens, initializer_range=0.5)
    model, path = GPT2LMHeadModel(config).eval(), tmp_path_factory.mktemp("positions") / "out"
    export_folder(model, path, proof="sample")
    return model, path


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 3])
def test_texts_go_to_the_last_position(folder, padding):
    """The last token is not read; padding has no position. One more is refused before the file is asked."""
    model, path = folder
    generator = open_generator(path)
    prompt = torch.randint(3, 96, (2, 20 + padding), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    wanted = model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(generator.generate(prompt, mask, max_new_tokens=5), wanted)
    with pytest.raises(IndexError):
        model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with pytest.raises(InvalidArgumentError, match="The text has 25 tokens, but the model has 24 positions"):
        generator.generate(prompt, mask, max_new_tokens=6)
    with pytest.raises(InvalidArgumentError, match=r"\A.*Pass a prompt of 24 or less.*\Z"):
        generator.generate(torch.ones(1, 30, dtype=torch.int64), max_new_tokens=2)
    steps = generator.stream(prompt, mask, max_new_tokens=9)
    assert [next(steps).tolist() for _ in range(5)] == wanted[:, -5:].T.tolist()
