"""Models whose weights are the same with every version of the libraries, and files that others wrote of them.

The files in `written/` are as these commands left them, with optimum-onnx 0.1.0 on transformers 4.57.6, and
onnxruntime-genai 0.18.0, mobius-onnx 0.1.0 and torch 2.13.0 on transformers 5.24.0. optimum's two decoders are in
`decoder_model_merged.onnx`; names of places on a disk and intermediate types were taken out of the last three::

    python -m tests.flatten.verify.peer_files build/t5 build/llama build/mistral
    optimum-cli export onnx --model build/t5 --task text2text-generation-with-past build/optimum
    python -m onnxruntime_genai.models.builder -i build/llama -o build/genai -p fp32 -e cpu
    mobius build --model build/llama build/mobius --dtype f32
    torch.onnx.export(llama(), kwargs=inputs, dynamic_shapes=..., dynamo=True)  # without a cache
    OnnxExporter().export_for_generation(mistral(), inputs, config=OnnxConfig(dynamic=True))
"""

from __future__ import annotations

import pathlib
import sys
import zlib

import torch
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

WRITTEN = pathlib.Path(__file__).parent / "written"
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return filled(T5ForConditionalGeneration(T5Config(vocab_size=48, decoder_start_token_id=0, **sizes, **_TOKENS)))


def llama():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # onnxruntime wants heads of 16
    return filled(LlamaForCausalLM(LlamaConfig(vocab_size=48, **sizes, **heads, **_TOKENS)))


def mistral():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    return filled(MistralForCausalLM(MistralConfig(vocab_size=48, **sizes, **heads, **_TOKENS)))


@torch.no_grad()
def filled(model):
    for name, weight in model.named_parameters():
        steps = torch.arange(weight.numel(), dtype=torch.float64) + 1
        values = torch.sin(steps * (1 + zlib.crc32(name.encode()) % 97)).reshape(weight.shape)
        weight.copy_(1 + 0.1 * values if weight.dim() == 1 else 0.5 * values)
    return model.eval()


if __name__ == "__main__":
    for make, folder in zip((t5, llama, mistral), sys.argv[1:], strict=True):
        make().save_pretrained(folder)
        ByT5Tokenizer().save_pretrained(folder)
