"""What the processes of `test_pipelining` run; each function returns what its test compares."""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.distributed.stages.pipeline import DistributedPipeline
from yobx_flatten import pytree_dataclass, register_flattening_functions, static_field
from yobx_flatten.huggingface.cache_names import cache_of

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}
ROWS, MICROBATCHES = 12, 4


@pytree_dataclass
class State:
    hidden: torch.Tensor
    ids: torch.Tensor  # no gradient comes back for it
    depth: int = static_field(default=0)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, ids):
        return State(self.table(ids), ids, depth=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, state):
        return State(torch.tanh(self.line(state.hidden)) * state.depth, state.ids, state.depth + 1)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 3)

    def forward(self, state):
        assert type(state) is State
        return {"logits": self.line(state.hidden), "ids": state.ids, "depth": state.depth}


def squares(outputs, labels):
    return ((outputs["logits"] - labels) ** 2).sum() / outputs["depth"]


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (ROWS, 5), generator=generator), torch.randn(ROWS, 5, 3, generator=generator)


def layers():
    torch.manual_seed(0)
    return [First(), Block(), Block(), Last()]


def check_against_one_process(pipeline, mine, reference, made, *, loss_fn=squares):
    """Two batches through the pipeline and microbatch by microbatch through the whole model: bitwise the same."""
    same = True
    for seed in (1, 2):
        inputs, labels = made(seed)
        given = {"input_args": (inputs,)} if dist.get_rank() == 0 else {}
        is_last = dist.get_rank() == dist.get_world_size() - 1
        found = pipeline.forward_backward(**given, label=labels if is_last else None, return_outputs=True)
        losses, outputs = [], []
        for part, label in zip(inputs.tensor_split(MICROBATCHES), labels.tensor_split(MICROBATCHES), strict=True):
            outputs.append(reference(part))
            losses.append(loss_fn(outputs[-1], label))
            losses[-1].backward()
        if is_last:
            loss, joined = found
            logits = torch.cat([out["logits"] for out in outputs])
            same &= torch.equal(loss, torch.stack(losses).sum()) and torch.equal(joined["logits"], logits)
            same &= joined["depth"] == outputs[0]["depth"] and not joined["logits"].requires_grad
        else:
            same &= found is None
        same &= all(torch.equal(p.grad, q.grad) for p, q in mine)
    return same


def pairs(mine, of_reference):
    return [
        (p, q)
        for a, b in zip(mine, of_reference, strict=True)
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    ]


def made_of(stages, schedule):
    example = () if dist.get_rank() else batch(0)[:1]
    return DistributedPipeline(
        stages, schedule, loss_reduction="sum", num_microbatch=MICROBATCHES, loss_fn=squares, example_args=example
    )


def plain_stages():
    """Modules of torch as stages, by each schedule."""
    rank, found = dist.get_rank(), {}
    for name, schedule in SCHEDULES.items():
        own = layers()
        reference = nn.Sequential(*copy.deepcopy(own))
        if name == "Interleaved1F1B":
            stages, kept = {rank: own[rank], rank + 2: own[rank + 2]}, [rank, rank + 2]
        else:
            kept = [2 * rank, 2 * rank + 1]
            stages = {rank: nn.Sequential(*(own[i] for i in kept))}
        pipeline = DistributedPipeline(
            stages,
            schedule,
            loss_reduction="sum",
            num_microbatch=MICROBATCHES,
            loss_fn=squares,
            example_args=batch(0)[:1] if not rank else (),
        )
        mine = pairs([own[i] for i in kept], [reference[i] for i in kept])
        found[name] = check_against_one_process(pipeline, mine, reference, batch)
    return found


def roundpipe_stages():
    """A pipeline of virtual devices in each stage; the whole model is one pipeline, too."""
    rank, found = dist.get_rank(), {}
    config = RoundPipeRunConfig(num_microbatch=1)
    for name in ("GPipe", "1F1B"):
        own = layers()
        reference = nn.Sequential(*copy.deepcopy(own))
        kept = [2 * rank, 2 * rank + 1]
        stage = RoundPipe(nn.Sequential(*(own[i] for i in kept)), devices="virtual:2", model_run_config=config)
        mine = pairs([own[i] for i in kept], [reference[i] for i in kept])
        found[name] = check_against_one_process(made_of({rank: stage}, SCHEDULES[name]), mine, reference, batch)
        stage.close()
    return found


class Front(nn.Module):
    """The first layers of a Llama, which hand on their output with a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=True)


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 11)

    def forward(self, output):
        keys = cache_of(output).layers[1].keys  # a gradient comes back through the cache, too
        return {"logits": self.head(output.last_hidden_state) * keys.mean(), "depth": 1}


def with_a_cache():
    """An output of transformers with a cache crosses, inside of the block."""
    from transformers import LlamaConfig, LlamaModel

    rank = dist.get_rank()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11
    )
    own = [Front(LlamaModel(config)), Back()]
    reference = nn.Sequential(*copy.deepcopy(own))

    def made(seed):
        inputs, _ = batch(seed)
        return inputs, torch.randn(ROWS, 5, 11, generator=torch.Generator().manual_seed(seed))

    with register_flattening_functions(patch_transformers=True):
        pipeline = DistributedPipeline(
            {rank: own[rank]},
            Schedule1F1B,
            loss_reduction="sum",
            num_microbatch=MICROBATCHES,
            loss_fn=squares,
            example_args=made(0)[:1] if not rank else (),
        )
        return check_against_one_process(pipeline, pairs([own[rank]], [reference[rank]]), reference, made)


def forward_alone():
    """A forward without gradients, before a training step and after it."""
    rank, own = dist.get_rank(), layers()
    reference = nn.Sequential(*copy.deepcopy(own))
    pipeline = made_of({rank: nn.Sequential(*own[2 * rank : 2 * rank + 2])}, ScheduleGPipe)
    found = []
    for seed in (1, 2):
        inputs, labels = batch(seed)
        given = (inputs,) if not rank else ()
        outputs = pipeline.forward(*given)
        if rank:
            found.append(torch.equal(outputs["logits"], torch.cat([reference(p)["logits"] for p in inputs.split(3)])))
            found.append(not outputs["logits"].requires_grad)
        else:
            found.append(outputs is None)
        pipeline.forward_backward(given, label=labels if rank else None)
    return all(found)


class Scaled(nn.Module):
    def __init__(self, into):
        super().__init__()
        self.line = nn.Linear(8, into)

    def forward(self, *values, scale=None):
        total = self.line(sum(values))
        return total if scale is None else (total * scale, torch.ones_like(total))


def keyword_arguments():
    """Each process gives its own stages keyword arguments; a tuple arrives as several arguments; the loss is a mean."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, last = Scaled(8), Scaled(1)
    reference = copy.deepcopy([first, last])
    x, scale = torch.randn(8, 8), torch.randn(8, 1)
    labels = torch.randn(8, 1)
    given = {} if rank else {"example_args": (x,), "example_kwargs": {"scale": scale}}
    pipeline = DistributedPipeline(
        {rank: (first, last)[rank]},
        ScheduleGPipe,
        num_microbatch=2,
        loss_fn=nn.functional.mse_loss,
        loss_reduction="mean",
        **given,
    )
    loss = pipeline.forward_backward(*(() if rank else ((x,), {"scale": scale})), label=labels if rank else None)
    wanted = nn.functional.mse_loss(reference[1](*reference[0](x, scale=scale)), labels)
    wanted.backward()
    same = [(p, q) for p, q in pairs([(first, last)[rank]], [reference[rank]])]
    for p, q in same:
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    if rank:
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    return True


class CountsRows(nn.Module):
    """What is not a tensor in its output differs from microbatch to microbatch."""

    def __init__(self):
        super().__init__()
        self.line, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return State(self.line(x), x, depth=self.calls)


class Longer(CountsRows):
    """Its output has another size in each call."""

    def forward(self, x):
        self.calls += 1
        return State(self.line(x).repeat(1, self.calls), x, depth=1)


class Unregistered:
    def __init__(self, value):
        self.value = value


class ReturnsUnregistered(nn.Linear):
    def forward(self, x):
        return Unregistered(super().forward(x))


class ReadsData(nn.Linear):
    """What it computes depends on the numbers, so that it cannot be called without them."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors():
    """The errors of both processes, by what is wrong."""
    rank = dist.get_rank()
    x = torch.ones(8, 8)

    def make(first=None, stages=None, example=x, microbatches=2, outputs=None, schedule=ScheduleGPipe):
        mine = {rank: (first or nn.Linear(8, 8), Scaled(1))[rank]} if stages is None else stages
        return DistributedPipeline(
            mine,
            schedule,
            loss_reduction="sum",
            num_microbatch=microbatches,
            loss_fn=nn.functional.mse_loss,
            example_args=() if rank else (example,),
            example_outputs=outputs,
        )

    found = {
        "unregistered": error_of(lambda: make(ReturnsUnregistered(8, 8))),
        "twice": error_of(lambda: make(stages={0: Scaled(8)})),
        "disagree": error_of(lambda: make(microbatches=2 + rank)),
        "few rows": error_of(lambda: make(example=x[:1])),
        "uneven": error_of(lambda: make(example=x[:7])),
        "reads data": error_of(lambda: make(ReadsData(8, 8))),
    }
    pipeline = make(ReadsData(8, 8), outputs=None if rank else {0: nn.Linear(8, 8)(x[:4])})
    labels = torch.ones(8, 1)
    found["told"] = error_of(lambda: pipeline.forward_backward(() if rank else (x,), label=labels if rank else None))
    if not rank:
        found["rows of a batch"] = error_of(lambda: pipeline.forward_backward((x[:6],)))
    if rank:
        found["arguments elsewhere"] = error_of(lambda: pipeline.forward_backward((x,), label=labels))
    return found


class Fails(nn.Module):
    """A stage that fails at its third microbatch when it is told to."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.calls, self.fails = 0, False

    def forward(self, x):
        self.calls += 1
        if self.fails and self.calls == 3:
            raise ArithmeticError("a bad microbatch")
        return self.line(x)


def failing():
    """A stage of each process in turn fails in the middle of a batch; the next batch is as the one before."""
    rank, found = dist.get_rank(), {}
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    given = {"input_args": (x,)} if rank == 0 else {"label": y}
    for name in ("GPipe", "1F1B"):
        torch.manual_seed(rank)
        module = Fails()
        pipeline = DistributedPipeline(
            {rank: module}, SCHEDULES[name], loss_reduction="sum", num_microbatch=4, loss_fn=nn.functional.mse_loss,
            example_args=(x,) if rank == 0 else (),
        )  # fmt: skip
        pipeline.forward_backward(**given)
        expected, module.line.weight.grad = module.line.weight.grad, None
        for bad in (0, 1):
            module.calls, module.fails = 0, rank == bad
            dist.barrier()
            begin = time.monotonic()
            error = error_of(lambda: pipeline.forward_backward(**given))  # noqa: B023 - called at once
            seconds = time.monotonic() - begin
            module.calls, module.fails, module.line.weight.grad = 0, False, None
            pipeline.forward_backward(**given)
            same = torch.equal(module.line.weight.grad, expected)
            module.line.weight.grad = None
            found[f"{name}, rank {bad}"] = [error, seconds < 1, same]
    return found


def alone():
    """What one process shows: errors in the midst of a run, which leave the others waiting."""
    x = torch.ones(8, 8)
    found = {}
    for name, first in (("static part", CountsRows()), ("sizes", Longer())):
        pipeline = DistributedPipeline(
            {0: first, 1: Last()},
            ScheduleInterleaved1F1B,
            loss_reduction="sum",
            num_microbatch=2,
            loss_fn=squares,
            example_args=(x,),
        )
        found[name] = error_of(lambda made=pipeline: made.forward_backward((x,), label=torch.ones(8, 3)))
    pipeline = DistributedPipeline(
        {0: nn.Linear(8, 8)}, ScheduleGPipe, loss_reduction="sum", num_microbatch=2, example_args=(x,)
    )
    found["no number"] = error_of(lambda: pipeline.forward_backward((x,)))
    unstated = DistributedPipeline(
        {0: nn.Linear(8, 8)}, ScheduleGPipe, num_microbatch=2, loss_fn=nn.functional.mse_loss, example_args=(x,)
    )
    found["no reduction"] = error_of(lambda: unstated.forward_backward((x,), label=x))
    return found


def untouched():
    """Making a pipeline changes no buffer, no random number and no counter of a module."""
    norm = nn.BatchNorm1d(8)
    before = copy.deepcopy(norm.state_dict())
    counting, last = CountsRows(), Last()
    state = torch.get_rng_state()
    DistributedPipeline(
        {0: nn.Sequential(norm, nn.Dropout(), counting), 1: last},
        ScheduleInterleaved1F1B,
        num_microbatch=2,
        example_args=(torch.ones(8, 8),),
    )
    same = all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())
    return same and counting.calls == 0 and torch.equal(torch.get_rng_state(), state)


def two():
    """All that two processes show."""
    return {
        one.__name__: one()
        for one in (plain_stages, roundpipe_stages, with_a_cache, forward_alone, keyword_arguments, errors, failing)
    }


def one():
    """All that a process alone shows."""
    return {"alone": alone(), "untouched": untouched()}
