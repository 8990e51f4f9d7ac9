"""Every class of layer and of cache, made small and filled with ones: what several test files walk through."""

import importlib
import math

import pytest
import torch
from transformers import cache_utils

WINDOW, ROOM = 8, 16


def numbers(*shape, dtype=torch.float32, device="cpu"):
    return (torch.arange(math.prod(shape), device=device) % 7).reshape(shape).to(dtype)


def states(length=3, *, batch=2, dtype=torch.float32, device="cpu"):
    shape = (batch, 2, length, 4)
    return numbers(*shape, dtype=dtype, device=device), 2 * numbers(*shape, dtype=dtype, device=device)


def attend(layer, length, **options):
    layer.update(*states(length, **options))


def index(layer, length, *, batch=2, dtype=torch.float32, device="cpu"):
    layer.update(*states(length, batch=batch, dtype=dtype, device=device))
    layer.update_indexer(numbers(batch, length, 3, dtype=dtype, device=device))


def recur(layer, length, *, batch=2, dtype=torch.float32, device="cpu"):
    layer.update_conv_state(numbers(batch, 5, 4, dtype=dtype, device=device))
    layer.update_recurrent_state(numbers(batch, 3, 3, dtype=dtype, device=device))


def recur_and_attend(layer, length, **options):
    recur(layer, length, **options)
    attend(layer, length, **options)


def sparse(layer, length, *, batch=2, dtype=torch.float32, device="cpu"):
    attend(layer, length, batch=batch, dtype=dtype, device=device)
    layer.update_index(numbers(batch, 1, length, 3, dtype=dtype, device=device))


def model_class(module, name):
    return getattr(pytest.importorskip(f"transformers.models.{module}"), name)


def compressed(layer, length, *, batch=2, dtype=torch.float32, device="cpu"):
    attend(layer, length, batch=batch, dtype=dtype, device=device)
    for name in layer.buffer_kv:
        layer.buffer_kv[name] = numbers(batch, 3, 4, dtype=dtype, device=device)
        layer.compressed_kv[name] = numbers(batch, 2, 4, dtype=dtype, device=device)
        layer.entry_count[name] = length // 2


# name -> how to make it, how to fill it
# of `cache_utils`: arguments, and how to fill it
OF_TRANSFORMERS = {
    "DynamicLayer": ((), attend),
    "DynamicSlidingWindowLayer": ((WINDOW,), attend),
    "StaticLayer": ((ROOM,), attend),
    "StaticSlidingWindowLayer": ((ROOM, WINDOW), attend),
    "DynamicIndexedLayer": ((), index),
    "StaticIndexedLayer": ((ROOM,), index),
    "LinearAttentionLayer": ((), recur),
    "LinearAttentionAndFullAttentionLayer": ((), recur_and_attend),
    "LinearAttentionAndSlidingWindowAttentionLayer": ((WINDOW,), recur_and_attend),
    "LinearAttentionAndStaticFullAttentionLayer": ((ROOM,), recur_and_attend),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": ((ROOM, WINDOW), recur_and_attend),
    "Fp8QuantizedLayer": ((), attend),
    "DummyLayer": ((), lambda layer, length, **options: None),
}
# of models: the module, too
OF_MODELS = {
    "DeepseekV4HCACache": ("deepseek_v4", (), compressed),
    "DeepseekV4CSACache": ("deepseek_v4", (), compressed),
    "MiniMaxM3VLSparseCacheLayer": ("minimax_m3_vl", (), sparse),
    "MiniMaxM3VLSparseStaticCacheLayer": ("minimax_m3_vl", (ROOM,), sparse),
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": ("unlimited_ocr", (WINDOW,), attend),
    "UnlimitedOcrStaticReferenceSlidingWindowLayer": ("unlimited_ocr", (3 * ROOM, WINDOW), attend),
}


def made_by(name):
    if name in OF_TRANSFORMERS:
        return lambda: getattr(cache_utils, name)(*OF_TRANSFORMERS[name][0])
    model, arguments, _ = OF_MODELS[name]
    configured = (deepseek_config,) if model == "deepseek_v4" else ()
    return lambda: model_class(f"{model}.modeling_{model}", name)(*(make() for make in configured), *arguments)


def deepseek_config():
    return model_class("deepseek_v4.configuration_deepseek_v4", "DeepseekV4Config")(
        num_hidden_layers=2,
        sliding_window=WINDOW,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    )


# name -> how to make it, how to fill it
LAYERS = {name: (made_by(name), row[-1]) for name, row in {**OF_TRANSFORMERS, **OF_MODELS}.items()}


def layer_of(name, length=3, **options):
    make, fill = LAYERS[name]
    layer = make()
    if length:
        fill(layer, length, **options)
    return layer


def of_model(module, name):
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def filled(cache, **options):
    for layer in range(2):
        cache.update(*states(**options), layer)
    return cache


def mtp(**options):
    return filled(cache_utils.MtpCache(), **options)


def dflash(length=3, **options):
    cache = filled(cache_utils.DFlashCache(), length=length, **options)
    cache.set_previous_accepted_tokens(length - 1)
    return cache


def minimax(batch=2, dtype=torch.float32, device="cpu", length=3):
    cache = filled(
        of_model("minimax.modeling_minimax", "MiniMaxCache")(), length=length, batch=batch, dtype=dtype, device=device
    )
    cache.set_linear_cache(2, numbers(batch, 2, 4, 4, dtype=dtype, device=device))
    return cache


def shared(**options):
    return cache_utils.KVSharingDict({"full": states(**options), "sliding": states(**options)})


def xlstm(batch=2, dtype=torch.float32, length=3, device="cpu"):
    config = of_model("xlstm.configuration_xlstm", "xLSTMConfig")(hidden_size=32, num_heads=2, num_hidden_layers=2)
    cache = of_model("xlstm.modeling_xlstm", "xLSTMCache")(config, batch, dtype=dtype, device=device)
    cache.seqlen_offset = length
    return cache


def mimi(batch=2, dtype=torch.float32, length=3, device="cpu"):
    cache = of_model("mimi.modeling_mimi", "MimiConv1dPaddingCache")(2, [2, 3], ["constant", "replicate"], [4, 4])
    cache.update(numbers(batch, 4, length, dtype=dtype, device=device), 0)
    return cache


def voxtral(batch=2, dtype=torch.float32, length=3, device="cpu"):
    module = "voxtral_realtime.modeling_voxtral_realtime"
    cache = of_model(module, "VoxtralRealtimeConv1dPaddingCache")()
    convolution = torch.nn.Identity()
    convolution.left_pad, convolution.in_channels = 2, 4
    for key in ("conv1", "conv2"):
        cache.update(numbers(batch, 4, length, dtype=dtype, device=device), key, convolution)
    return cache


def reformer(batch=2, dtype=torch.float32, length=3, device="cpu"):
    cache = of_model("reformer.modeling_reformer", "ReformerDynamicCache")()
    cache.update(None, numbers(batch, length, 4, dtype=dtype, device=device), 0)
    cache.update(
        numbers(batch, 2, 1, length, dtype=torch.long), numbers(batch, length, 4, dtype=dtype, device=device), 1
    )
    return cache


def sam2_video(batch=2, dtype=torch.float32, length=3, device="cpu"):
    cache = of_model("sam2_video.modeling_sam2_video", "Sam2VideoInferenceCache")()
    x = numbers(length, batch, 4, dtype=dtype)  # it copies them to the CPU
    cache.cache_vision_features(0, {"vision_feats": [x, x + 1], "vision_pos_embeds": [x + 2]})
    return cache


def parakeet(batch=2, dtype=torch.float32, length=3, device="cpu"):
    configuration = importlib.import_module("transformers.models.parakeet.configuration_parakeet")
    name = "ParakeetRNNTConfig" if hasattr(configuration, "ParakeetRNNTConfig") else "ParakeetTDTConfig"
    config = getattr(configuration, name)()
    cache = of_model("parakeet.generation_parakeet", "ParakeetRNNTDecoderCache")(config)
    size, layers = config.decoder_hidden_size, config.num_decoder_layers
    state = numbers(layers, batch, size, dtype=dtype, device=device)
    cache.update(numbers(batch, 1, size, dtype=dtype, device=device), state, state + 1)
    return cache


CACHES = {
    "MtpCache": mtp,
    "DFlashCache": dflash,
    "MiniMaxCache": minimax,
    "KVSharingDict": shared,
    "xLSTMCache": xlstm,
    "MimiConv1dPaddingCache": mimi,
    "VoxtralRealtimeConv1dPaddingCache": voxtral,
    "ReformerDynamicCache": reformer,
    "Sam2VideoInferenceCache": sam2_video,
    "ParakeetRNNTDecoderCache": parakeet,
}


def equal(a, b):
    """Compare two attributes: tensors by identity, containers and objects by what is in them."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "to_dict"):
        return type(a) is type(b) and a.to_dict() == b.to_dict()
    if type(a).__module__.startswith("transformers.") and hasattr(a, "__dict__"):
        return type(a) is type(b) and equal(vars(a), vars(b))
    return type(a) is type(b) and a == b


# torch makes the first when a layer is filled, and one serves all layers with that window
SHARED = {"_sliding_window_tensor"}


def differences(a, b):
    left, right = vars(a), vars(b)
    names = (left.keys() | right.keys()) - SHARED
    return sorted(name for name in names if name not in left or name not in right or not equal(left[name], right[name]))
