"""Folders of models that go on from states generate what the model generates, token by token."""

import pytest
import torch
from transformers.cache_utils import Cache

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import OnnxGenerator, ProgramGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 several tokens after a state leave the mask out"
    ),
]


STATES = [("mamba", "onnx"), ("lfm2", "onnx"), ("lfm2", "program")]


@pytest.mark.parametrize(("name", "to"), cases(STATES, quick=STATES[:1]))
def test_states_begin_as_zeros(name, to):
    """One file reads a prompt of one token, of many, and padded ones; it searches with beams."""
    model, folder = exported(name, to)
    generator = OnnxGenerator(folder, threads=1) if to == "onnx" else ProgramGenerator(folder, trust=True)
    ids = torch.randint(3, 259, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    prompts = [(ids, mask), (ids[:1, :1], mask[1:2, :1]), (ids.repeat(1, 4), torch.ones(3, 36).long())]
    for tokens, shown in prompts:
        for options in ({}, {"num_beams": 2}):
            found = generator.generate(tokens, shown, max_new_tokens=12, **options)
            wanted = model.generate(tokens, attention_mask=shown, max_new_tokens=12, do_sample=False, **options)
            assert found.tolist() == wanted.tolist(), (tokens.shape, options)
