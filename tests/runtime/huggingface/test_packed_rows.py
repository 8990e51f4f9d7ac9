"""Rows of several texts: a warning where a model lets a text see the one before it, and none where it does not."""

import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="models are those of transformers")

from roundpipe_runtime import RoundPipeWarning
from roundpipe_runtime.huggingface.batches import is_packed, keeps_texts_apart
from tests.runtime.huggingface.hf_small import known_model, wrapped

pytestmark = pytest.mark.slow

APART = ["llama", "gemma3_text"]
TOGETHER = ["qwen3_5_text", "bamba", "falcon_h1", "mamba"]


def texts():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 90, (2, 9), generator=generator), torch.randint(5, 90, (2, 7), generator=generator)


def packed_batch():
    ids = torch.cat(texts(), 1)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1).contiguous()
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_packed_rows_of_a_model(name):
    model = known_model(name).eval()
    batch = packed_batch()
    given = {"position_ids": batch["position_ids"]} if name != "mamba" else {}
    with torch.no_grad():
        behind = model(input_ids=batch["input_ids"], use_cache=False, **given)[0][:, 9:]
        alone = model(input_ids=texts()[1], use_cache=False)[0]
    is_apart = torch.allclose(behind, alone, atol=1e-4)
    assert is_apart is (name in APART)
    assert bool(keeps_texts_apart(model)) is is_apart


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "bamba"])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_a_wrapped_model_warns_once(name, call):
    model = known_model(name)
    pipeline = wrapped(model, microbatches=1)
    batch = packed_batch()

    def run(given):
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(call == "forward_backward"):
            warnings.simplefilter("always")
            if call == "forward":
                loss = pipeline(**given).loss
            else:
                loss = pipeline.forward_backward(input_kwargs={k: v for k, v in given.items() if k != "use_cache"})
        return loss.item(), [str(one.message) for one in caught if issubclass(one.category, RoundPipeWarning)]

    one_text = {**batch, "position_ids": torch.arange(16).expand(2, -1)}
    assert run(one_text)[1] == []
    first, second = run(batch), run(batch)
    found = [text for text in first[1] if "packed rows" in text]
    assert len(found) == (name in TOGETHER)
    assert second[1] == []
    with torch.no_grad():
        expected = model(**{**batch, "use_cache": False}).loss.item()
    assert first[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([[0, 1, 2, 0, 1, 2]], None, True),
        ([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]], None, True),
        ([[4, 5, 6, 0, 1, 2]], None, True),
        ([[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 1, 1, 1]], True),
        ([[0, 1, 2, 3, 4, 5]], None, False),
        ([[0, 0, 0, 1, 2, 3]], None, False),  # padded on the left
        ([[1, 1, 0, 1, 2, 3]], [[0, 0, 1, 1, 1, 1]], False),  # as generate does
        ([[0, 1, 2, 3, 0, 0]], None, False),  # padded on the right
        ([[[0, 1, 2, 0, 1, 2]]] * 3, None, True),  # of text, height and width
    ],
)
def test_positions_that_begin_again(positions, mask, expected):
    given = {"position_ids": torch.tensor(positions)}
    if mask is not None:
        given["attention_mask"] = torch.tensor(mask)
    assert is_packed(given) is expected
