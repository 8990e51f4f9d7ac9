"""Small trainings that one process and several do alike, and a digest of all that comes out of them."""

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_runtime import OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.distributed.replicas.reduction import rows_of_rank
from tests.models import make_model

__all__ = ["CASES", "Case", "digest", "in_ranks", "train"]

VOCABULARY, LENGTH = 96, 6


@dataclasses.dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    rows: int = 7
    groups: Callable[[int], int] = lambda size: size
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulated: int = 1
    no_sync: bool = False
    is_async: bool = False
    copies: bool = False
    is_split: bool = False
    keep: float | Literal["auto"] = 0


def model(name: str, **changes: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return _transformers_model(name, **changes)

    return made


def _transformers_model(name: str, **changes: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
    match name:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))
        case "mixtral":
            routed = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
            config = transformers.MixtralConfig(**sizes, **routed)
            return transformers.MixtralForCausalLM(config)
        case "gpt2":
            config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4)
            return transformers.GPT2LMHeadModel(config)
        case _:
            return copy.deepcopy(make_model(name))  # which is shared by all tests


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = _transformers_model("llama")
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def bfloat16() -> nn.Module:
    return model("llama")().bfloat16()


CASES = {
    "llama": Case(model("llama")),
    "gemma2": Case(model("gemma2")),
    "mixtral, auxiliary loss": Case(model("mixtral")),
    "auxiliary loss of one row": Case(model("mixtral"), rows=1),
    "backward by the caller, dropout": Case(model("gpt2"), is_split=True, groups=lambda size: size + 1),
    "backward by the caller, accumulated": Case(model("llama"), is_split=True, accumulated=2, no_sync=True),
    "gpt2, dropout": Case(model("gpt2")),
    "t5": Case(model("t5")),
    "lora": Case(lora),
    "lora, weights stay": Case(lora, keep="auto", accumulated=2),
    "asynchronous, weights stay": Case(lora, keep="auto", is_async=True),
    "tied": Case(model("llama", tie_word_embeddings=True)),
    "more groups than ranks": Case(model("llama"), groups=lambda size: 2 * size + 1),
    "one row": Case(model("llama"), rows=1),
    "bfloat16 with masters": Case(bfloat16, options={"optim_dtype": torch.float32}),
    "gradients kept as bfloat16": Case(
        bfloat16, options={"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16}, accumulated=2
    ),
    "gradients travel as bfloat16": Case(model("llama"), options={"reduce_dtype": torch.bfloat16}),
    "accumulated": Case(model("llama"), accumulated=2),
    "accumulated on the rank": Case(model("llama"), accumulated=2, no_sync=True, groups=lambda size: size + 1),
    "asynchronous": Case(model("llama"), is_async=True),
    "weights stay": Case(bfloat16, options={"optim_dtype": torch.float32}, accumulated=2, keep="auto"),
    # large enough not to travel whole; rows of a batch are few of the table's
    "tables in slices": Case(
        model("llama", vocab_size=140_000, tie_word_embeddings=True), options={"large_tables": "slices"}
    ),
    "whole on each rank": Case(bfloat16, options={"optim_dtype": torch.float32}, copies=True),
}


def batch(case: Case, number: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: a different number of tokens counts in each row."""
    tokens = torch.randint(3, VOCABULARY, (case.rows, LENGTH), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    for row in range(case.rows):
        labels[row, : (row + number) % (LENGTH - 1)] = -100
    return {"input_ids": tokens, "labels": labels}


def train(case: Case, size: int, steps: int, mesh: DeviceMesh | None = None, rank: int = 0) -> dict[str, Any]:
    """Train, alone or as one rank of a mesh; return losses, norms and weights."""
    wrapped_in = 1 if mesh is None else mesh.size()
    whole = case.model()
    replicas = case.groups(size)
    torch.manual_seed(7)
    pipeline = wrap_model_to_roundpipe(
        whole, lower_threshold=0, devices="virtual:2", name="x", mesh=mesh, replicas=replicas, check=False,
        **case.options,
    )  # fmt: skip
    pipeline.train()
    config = RoundPipeRunConfig(num_microbatch=2, keep_parameters=case.keep)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW([p for p in pipeline.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses: list[float] = []
    norms: list[float] = []
    own = rows_of_rank(case.rows, rank, wrapped_in, replicas)

    def step() -> None:
        norms.append(pipeline.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()

    for number in range(steps):
        for part in range(case.accumulated):
            rows = {name: tensor[own] for name, tensor in batch(case, case.accumulated * number + part).items()}
            is_last = part == case.accumulated - 1
            with pipeline.no_sync() if case.no_sync and not is_last else torch.enable_grad():
                if case.is_split:
                    loss = _backward_by_the_caller(pipeline, rows, case, config, mesh)
                else:
                    loss = pipeline.forward_backward(input_kwargs=rows, run_config=config)
            losses.append(loss.item())
        pipeline.step(step, is_async=case.is_async)
    pipeline.synchronize()
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    pipeline.close()
    return {"losses": losses, "norms": norms, "weights": weights}


def _backward_by_the_caller(pipeline, rows, case, config, mesh):  # type: ignore[no-untyped-def] # see `train`
    """A loss of a rank is its share of that of the batch; the sums are those of all ranks."""
    logits = pipeline(input_ids=rows["input_ids"], roundpipe_run_config=config).logits.float()
    shares = logits.logsumexp(-1).sum(1) / case.rows
    shares.sum().backward()
    whole = torch.zeros(case.rows)
    whole[: shares.numel()] = shares.detach()
    if mesh is not None:
        found = [torch.zeros_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(found, whole)
        whole = torch.cat(found)
    return whole.sort().values.double().sum()


def digest(result: dict[str, Any]) -> str:
    found = hashlib.sha256(repr((result["losses"], result["norms"])).encode())
    for name, value in sorted(result["weights"].items()):
        found.update(name.encode())
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def in_ranks(steps: int, names: list[str]) -> dict[str, Any]:
    """What one rank finds, of all cases in one start: digests of trainings, and what happens when a rank fails."""
    from tests.runtime.distributed import faults

    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, copies = dist.init_device_mesh("cpu", (size,)), dist.init_device_mesh("cpu", (size, 1))
    own = names[rank::size]
    # of which no weights stay on the devices: that is no part of what comes out
    one = {name: digest(train(dataclasses.replace(CASES[name], keep=0), size, steps)) for name in own}
    ranks = {}
    for name in names:
        case = CASES[name]
        ranks[name] = digest(train(case, size, steps, copies if case.copies else mesh, rank))
    dist.barrier()
    return {"one": one, "ranks": ranks, **faults.in_ranks()}


def in_copies(name: str) -> list[bool]:
    """Whether each of four processes, two copies of two shards, has the bits of one process with four groups."""
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = digest(train(CASES[name], 4, 1, mesh, dist.get_rank()))
    expected = [digest(train(CASES[name], 4, 1)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(expected)
    return [found == expected[0]]
