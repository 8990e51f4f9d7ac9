"""News of a failure stop the call that they concern, and no later one."""

import torch
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.device.worker import Outcome
from roundpipe_runtime.distributed.ranks.alarm import Alarm, News
from roundpipe_runtime.errors import StoppedByRankError
from tests.runtime.small import near

CONFIG = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")


class Layer(nn.Module):
    """A layer in which news of a call arrive."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.groups, self.number = None, None

    def forward(self, x):
        if self.groups is not None:
            self.groups.ranks.alarm._hear(self.number)
        return self.line(x)


def fails_with(function):
    """The class of the error that a function raises."""
    with Outcome() as outcome:
        function()
    return type(outcome.error)


def pipelines(wrap):
    """A model, its pipeline of two groups, and a call of it."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Linear(4, 4))
    pipeline = wrap(model, replicas=2)
    inputs, labels = torch.randn(8, 4), torch.randn(8, 4)

    def run():
        return pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=CONFIG)

    return model, pipeline, run, lambda: nn.functional.mse_loss(model(inputs), labels)


def test_news_of_the_call_before_do_not_stop_a_call_that_tries_layers(wrap):
    """They arrive a moment later, while the next call tries on a few rows whether layers keep rows apart."""
    model, pipeline, run, plain = pipelines(wrap)
    expected = plain().detach()
    groups = pipeline._rp_groups
    model[0].groups, model[0].number = groups, groups._number
    heard, hear = [], groups.ranks.alarm._hear  # a trial of layers leaves what belongs to the pipeline alone
    groups.ranks.alarm._hear = lambda number: (heard.append(number), hear(number))
    assert near(run(), expected)
    assert len(heard) > 4  # two groups of two microbatches, and the layers that were tried before


def test_news_of_a_call_stop_it(wrap):
    """So does the news that a rank is gone, which names no call."""
    model, pipeline, run, _ = pipelines(wrap)
    groups = pipeline._rp_groups
    for number in (groups._number + 1, None):
        model[0].groups, model[0].number = groups, number
        assert fails_with(run) is StoppedByRankError
        assert groups.news.reason is None


def test_news_that_are_delivered_late_stop_no_later_call():
    """A thread that has looked up who listens may be halted there until the next call has begun."""
    alarm = Alarm(None, 0, 1)
    news = News(alarm)
    with news.listening(1):
        late = alarm._listener
        late(1)
        assert isinstance(news.reason, StoppedByRankError)
    assert news.reason is None
    with news.listening(2):
        late(1)
        assert news.reason is None
        alarm._hear(2)
        assert isinstance(news.reason, StoppedByRankError)
