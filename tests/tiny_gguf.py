"""Write a small Llama as a GGUF file, with a tokenizer of bytes."""

import gguf
import numpy

WIDTH, INNER, LAYERS, HEADS, WORDS = 64, 96, 2, 4, 288


def _words():
    """Bytes as byte-level tokenizers write them, a word of two, and the special words after them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    special = [f"<|{n}|>" for n in range(WORDS - 257)]
    return [letters[byte] for byte in range(256)] + ["ab", *special]


def _weights():
    """By ggml's names: each matrix in one of its types."""
    draw, sizes = numpy.random.default_rng(0), {}
    for layer in range(LAYERS):
        for name, (rows, columns) in {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (WIDTH // 2, WIDTH),
            "attn_v": (WIDTH // 2, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items():
            sizes[f"blk.{layer}.{name}.weight"] = rows, columns
    matrices = {name: draw.standard_normal(size).astype(numpy.float32) * 0.2 for name, size in sizes.items()}
    matrices["token_embd.weight"] = draw.standard_normal((WORDS, WIDTH)).astype(numpy.float32)
    return matrices


def write(path, types=("Q4_1", "Q8_0")):
    """A Llama, whose matrices are of the first type and whose table is of the second."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_words())
    writer.add_token_types([1] * 257 + [3] * (WORDS - 257))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for name, matrix in _weights().items():
        kind = gguf.GGMLQuantizationType[types[name == "token_embd.weight"]]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, matrix)
        else:
            writer.add_tensor(name, gguf.quantize(matrix, kind), raw_dtype=kind)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(WIDTH, numpy.float32))
    writer.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
