"""
Every kind of cache layer
=========================

Caches contain different state: keys and values, a window of them, the state of a recurrence, the keys of an indexer, two
caches in one. This page has one small model with random weights per kind. Each model reads 12 tokens; its cache is
flattened and rebuilt, and both caches continue for 8 tokens.
"""

# %%
# Six models
# ----------
#
# All sizes are tiny. The configurations differ in the kind of layers.

import copy

import matplotlib.pyplot as plt
import torch
import torch.utils._pytree as pytree
import transformers

from yobx_flatten import flattening_list, register_flattening_functions

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOW_RANK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
MODELS = {
    "Llama": ("LlamaConfig", SIZES),
    "Gemma 3": (
        "Gemma3TextConfig",
        SIZES
        | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Mamba 2": (
        "Mamba2Config",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}
        | {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        SIZES
        | EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
        }
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "GLM MoE DSA": (
        "GlmMoeDsaConfig",
        SIZES
        | LOW_RANK
        | {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 8,
        }
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        }
        | {"first_k_dense_replace": 1},
    ),
    "T5": (
        "T5Config",
        {
            "vocab_size": 128,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
        },
    ),
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make(name):
    config_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**options, **TOKENS)
    torch.manual_seed(0)
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if name == "T5"
        else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config).eval()


# %%
# Run, flatten, rebuild, continue
# -------------------------------
#
# State space models call their cache ``cache_params``, and encoder-decoder models accept ``decoder_input_ids``; otherwise
# the steps are the same. The original is copied first, since some layers write into their tensors.


def names_of_arguments(model):
    if model.config.is_encoder_decoder:
        return "decoder_input_ids", "past_key_values"
    return "input_ids", "cache_params" if hasattr(
        model, "backbone"
    ) else "past_key_values"


@torch.no_grad()
def generate(model, tokens, cache, steps, **extra):
    """Generate greedily from a cache, and return the logits of each step."""
    ids, past = names_of_arguments(model)
    logits = []
    for _ in range(steps):
        outputs = model(**{ids: tokens, past: cache, **extra}, use_cache=True)
        cache = getattr(outputs, past)
        logits.append(outputs.logits)
        tokens = outputs.logits[:, -1:].argmax(-1)
    return logits, cache, tokens


found = {}
for name in MODELS:
    model = make(name)
    prompt = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(1))
    extra = {}
    if model.config.is_encoder_decoder:
        with torch.no_grad():
            extra["encoder_outputs"] = model.get_encoder()(input_ids=prompt[:, :7])
    _, cache, token = generate(model, prompt, None, steps=1, **extra)
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten(
            [copy.deepcopy(leaf) for _, leaf in named], spec
        )
    expected, _, _ = generate(model, token, cache, steps=8, **extra)
    logits, _, _ = generate(model, token, rebuilt, steps=8, **extra)
    equal = [torch.equal(a, b) for a, b in zip(expected, logits, strict=True)]
    paths = [pytree.keystr(path) for path, _ in named]
    found[name] = (cache, paths, [leaf for _, leaf in named], equal)
    print(
        f"{name}: {type(cache).__name__}, {len(named)} leaves, {sum(equal)} of {len(equal)} steps bit-equal"
    )

# %%
# The leaves and their names
# --------------------------
#
# The letter after a name is the kind of layer; the Flattening List explains the letters.

for name, (_, paths, leaves, _) in found.items():
    print(name)
    for path, leaf in zip(paths, leaves, strict=True):
        print(
            "   ", path, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        )

letters = ("D", "W", "L", "I")
for row in flattening_list():
    if row.code in letters:
        print(f"{row.code}: {row.cls.rpartition('.')[2]}, static: {row.static}")

# %%
# A picture
# ---------
#
# On the left, the number of elements in each cache after 12 tokens, by kind. The caches of Llama and T5 grow with every
# token; the cache of Mamba 2 has its full size from the start. On the right, the 8 steps of each rebuilt cache: a filled
# square is a step whose logits are bitwise identical.

KINDS = {
    "keys and values": ("key", "#4c72b0"),
    "convolution states": ("conv_states", "#dd8452"),
    "recurrent states": ("recurrent_states", "#3a923a"),
    "indexer keys": ("indexer", "#8172b3"),
}


def kind_of(path):
    return next(
        (kind for kind, (word, _) in KINDS.items() if f"'{word}" in path),
        "keys and values",
    )


fig, (left, right) = plt.subplots(
    1, 2, figsize=(9.6, 3.6), sharey=True, width_ratios=[3, 1.2], layout="constrained"
)
for position, (_, paths, leaves, equal) in enumerate(found.values()):
    start = 0
    for kind, (_, color) in KINDS.items():
        count = sum(
            leaf.numel() for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and kind_of(path) == kind
        )  # fmt: skip
        left.barh(position, count, left=start, color=color, height=0.6)
        start += count
    left.annotate(
        f"{len(leaves)} leaves",
        (start, position),
        (5, 0),
        textcoords="offset points",
        va="center",
        size=9,
    )
    for step, same in enumerate(equal, 1):
        right.plot(
            step,
            position,
            "s",
            ms=9,
            mec="#3a923a" if same else "#c44e52",
            mfc="#3a923a" if same else "none",
        )
left.set_yticks(range(len(found)), list(found))
left.invert_yaxis()
left.set_xlim(0, left.get_xlim()[1] * 1.12)
left.set_xlabel("numbers held after 12 tokens, one row")
left.set_title("The leaves of a cache", loc="left", fontsize=11)
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, color in KINDS.values()]
left.legend(handles, KINDS, frameon=False, loc="best", fontsize=9)
right.set_xticks(range(1, 9))
right.set_xlim(0.3, 8.7)
right.set_xlabel("step after rebuilding")
right.set_title("Equal, bit by bit", loc="left", fontsize=11)
for ax in (left, right):
    ax.spines[["right", "top"]].set_visible(False)
right.spines["left"].set_visible(False)
right.tick_params(axis="y", length=0)
