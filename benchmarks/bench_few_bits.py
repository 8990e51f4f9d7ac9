"""Measure the memory of a process that trains adapters of a model in 4 bits, with layers of the shape of Llama 7B.

The model is made on meta, and each weight is drawn and quantized before the next one. `--layers 32` is the whole model.
"""

import argparse
import importlib.util
import resource
import time

import accelerate
import torch
import transformers

from roundpipe_runtime import RoundPipeRunConfig, VirtualDevice, quantize_frozen, wrap_model_to_roundpipe
from roundpipe_runtime.fine_tune import Lora, add_lora


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kind", default="nf4", choices=["nf4", "fp4", "int8"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", type=int, default=900, metavar="MB", help="memory of the device")
    asked = parser.parse_args()
    if importlib.util.find_spec("bitsandbytes") is None:
        print("bitsandbytes is not installed: pip install 'yobx-flatten[quantized]'")
        return
    config = transformers.LlamaConfig(num_hidden_layers=asked.layers)  # its defaults are the shape of 7 billion
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    start = time.process_time()

    def drawn(name: str) -> torch.Tensor:
        weight = torch.empty(shapes[name], dtype=torch.bfloat16)
        return weight.fill_(1) if weight.dim() == 1 else weight.normal_(0, 0.02, generator=generator)

    quantize_frozen(model, asked.kind, weights=drawn)
    whole = sum(shape.numel() for shape in shapes.values())
    print(f"{whole / 1e9:.2f} billion parameters, {2 * whole / 1e9:.1f} GB in bfloat16")
    print(f"quantized to {asked.kind} in {time.process_time() - start:.0f} s of processor time, peak {_peak():.2f} GB")
    model = add_lora(model, Lora(8, 16, ("q_proj", "v_proj"))).train()
    run = RoundPipeRunConfig(num_microbatch=1)
    device = VirtualDevice("small", memory_limit=asked.device * 1_000_000)  # also memory of the process
    pipe = wrap_model_to_roundpipe(model, devices=[device], model_run_config=run, check=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.randint(5, config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    for step in range(asked.steps):
        before = pipe.parameter_traffic.uploaded
        loss = pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens}).item()
        optimizer.step()
        optimizer.zero_grad()
        moved = (pipe.parameter_traffic.uploaded - before) / 1e9
        print(f"step {step + 1}  loss {loss:.4f}  {moved:.2f} GB over the link  peak {_peak():.2f} GB", flush=True)
    pipe.close()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
