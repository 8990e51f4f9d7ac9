"""Rows that are cut over processes, next to the reference model with whole rows."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from roundpipe_runtime import ModelExecutePlan, OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.long_rows import LongRows
from tests.runtime.device.measuring_device import MeasuringDevice
from tests.runtime.distributed.faults import raised_by
from tests.runtime.distributed.trainer_ranks import distance
from tests.runtime.distributed.trainings import VOCABULARY, lora, model


def batch(rows: int, length: int, seed: int, padded: int = 0) -> dict[str, torch.Tensor]:
    """Tokens that are their own labels, of which some do not count, and rows that end early."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    labels = tokens.masked_fill(torch.rand(rows, length, generator=generator) < 0.2, -100)
    if padded:
        mask[0, -padded:] = 0
        labels[0, -padded:] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def trained(made: Any, batches: list[dict[str, torch.Tensor]], **options: Any) -> dict[str, Any]:
    """Losses and the worst relative difference of a weight, of three steps of both models."""
    own = made().double()
    plain = copy.deepcopy(own)
    rows = LongRows(own, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), devices="virtual:1", **options)
    with OptimizerCtx():
        ours = torch.optim.SGD(rows.pipeline.parameters(), lr=0.1)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    losses, expected = [], []
    for given in batches:
        losses.append(rows.forward_backward(given).item())
        rows.pipeline.step(lambda: (ours.step(), ours.zero_grad()))
        loss = plain(**given, use_cache=False).loss
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        expected.append(loss.item())
    rows.pipeline.synchronize()
    cut, name = rows.pipeline.cut.report, plain.config._attn_implementation
    rows.close()
    return {
        "losses": losses, "expected": expected, "distance": distance(list(own.parameters()), list(plain.parameters())),
        "whole": cut.is_whole, "attention": own.config._attn_implementation == name, "sent": rows._exchange.sent,
    }  # fmt: skip


def in_ranks() -> dict[str, Any]:
    """Trainings of several models: odd lengths, padding, one token for a process, adapters, tied weights."""
    warnings.simplefilter("ignore")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    batches = [batch(2, 11, 1), batch(1, 12, 2), batch(3, 7, 3, padded=4)]
    many = {"num_key_value_heads": 2} if dist.get_world_size() == 2 else {}
    found = {
        "llama": trained(model("llama", **heads), batches),
        "queries share keys": trained(model("llama", **{**heads, **many}), batches),
        "tied": trained(model("llama", **heads, tie_word_embeddings=True), batches),
        "short rows": trained(model("llama", **heads), [batch(2, 2, 4), batch(2, 1 + dist.get_world_size(), 5)]),
    }
    if dist.get_world_size() == 2:
        found["adapters"] = trained(lora, batches)
    return {**found, "again": trained(model("llama", **heads), batches) == found["llama"]}


def memory() -> list[float]:
    """Peak memory of the device of this rank, and of one that has whole rows."""
    warnings.simplefilter("ignore")
    peaks = []
    given = batch(1, 768, 1)
    for is_cut in (True, False):
        device = MeasuringDevice("virtual:0")
        own = model("llama", max_position_embeddings=768)()
        if is_cut:
            rows = LongRows(own, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), devices=[device])
            rows.forward_backward(given)
            rows.close()
        else:
            whole = wrap_model_to_roundpipe(own, devices=[device])
            plan = ModelExecutePlan([range(i, i + 1) for i in range(3)], [range(i, i + 1) for i in (3, 2, 1, 0)])
            config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
            whole.forward_backward(input_kwargs=given, run_config=config)
            whole.close()
        peaks.append(device.footprint.peak)
    return peaks


def failures() -> dict[str, Any]:
    """What is raised where one rank fails in a layer or has another batch, and whether the next call is right."""
    warnings.simplefilter("ignore")
    own = model("llama")().double()
    plain = copy.deepcopy(own)
    rows = LongRows(own, mesh=init_device_mesh("cpu", (2,)), devices="virtual:1")
    found: dict[str, Any] = {}
    given = batch(2, 9, 1)

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("a layer of one process")

    hook = own.model.layers[1].post_attention_layernorm.register_forward_hook(fail)
    found["layer"] = raised_by(lambda: rows.forward_backward(given))
    hook.remove()
    found["gradients"] = sum(p.grad is not None for p in own.parameters())
    found["batches"] = raised_by(lambda: rows.forward_backward(batch(2, 9, dist.get_rank())))
    found["next"] = [rows.forward_backward(given).item(), plain(**given, use_cache=False).loss.item()]
    rows.close()
    return found


def refusals() -> dict[str, Any]:
    """What is refused, before anything runs where that can be known."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))

    def made(name: str = "llama", devices: str = "virtual:1", **changes: Any) -> LongRows:
        return LongRows(model(name, **changes)(), mesh=mesh, devices=devices)

    rows = made()
    given = batch(2, 8, 1, padded=3)
    left = {**given, "attention_mask": given["attention_mask"].flip(1)}
    counted = {**given, "labels": given["input_ids"]}
    found = {
        "heads": raised_by(lambda: made(num_attention_heads=4, num_key_value_heads=1)),
        "router": raised_by(lambda: made("mixtral")),
        "devices": raised_by(lambda: made(devices="virtual:2")),
        "left": raised_by(lambda: rows.forward_backward(left)),
        "padding": raised_by(lambda: rows.forward_backward(counted)),
        "positions": raised_by(lambda: rows.forward_backward({**given, "position_ids": given["input_ids"]})),
    }
    rows.close()
    windows = made("mistral", sliding_window=8)
    found["window"] = raised_by(lambda: windows.forward_backward(batch(1, 12, 1)))
    windows.close()
    return found
