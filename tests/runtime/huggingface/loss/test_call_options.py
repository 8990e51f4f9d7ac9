"""Tests of huggingface.loss.call_options: what passes to the last piece next to the arguments of a model."""

import pytest
import torch

from roundpipe_runtime import ConfigError
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.huggingface import SmoothedLoss
from roundpipe_runtime.huggingface.loss.call_options import CALL_OPTIONS, CallOptions, split_options

from ..hf_small import Toy, tokens, wrapped


def test_options_are_split_like_the_rows():
    labels = torch.arange(10).reshape(5, 2)
    options = CallOptions(smoothed_loss=SmoothedLoss(0.2), labels=labels)
    parts = split((), {"input_ids": tokens(), CALL_OPTIONS: options}, None, 2)
    found = [part.kwargs[CALL_OPTIONS] for part in parts]
    assert torch.equal(torch.cat([one.labels for one in found]), labels)
    assert [len(one.labels) for one in found] == [len(part.kwargs["input_ids"]) for part in parts]
    assert all(one.smoothed_loss is options.smoothed_loss for one in found)


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_model_never_sees_options(is_cut):
    seen = []

    class Any(Toy):
        def forward(self, input_ids, **kwargs):
            seen.append(set(kwargs))
            return super().forward(input_ids)

    pipeline = wrapped(Any(), example={"input_ids": tokens(2)}, use_sequential_preset=None if is_cut else False)
    with torch.no_grad():
        pipeline(input_ids=tokens(), flag=torch.ones(5))
    assert len(pipeline.cut.pieces) == (5 if is_cut else 1)
    assert {"flag"} in seen
    assert not any(CALL_OPTIONS in names for names in seen)


def test_options_of_another_class_are_refused():
    with pytest.raises(ConfigError, match=r"kwargs\['roundpipe_call_options'\]: expected CallOptions, found str"):
        split_options({CALL_OPTIONS: "loss only"})
