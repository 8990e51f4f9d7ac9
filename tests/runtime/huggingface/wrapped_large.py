"""Wraps a Llama of 222 MB with its check, and prints how far memory grew: run by a test in a process of its own."""

import resource
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

_UNIT = 1 if sys.platform == "darwin" else 1024


def peak() -> int:
    """Bytes that the process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def main() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, vocab_size=2000
    )
    model = LlamaForCausalLM(config)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    before = peak()
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:1", use_sequential_preset=True)
    sys.stdout.write(f"{weights} {peak() - before} {pipeline.cut.report.equivalence.parameters}\n")
    pipeline.close()


if __name__ == "__main__":
    main()
