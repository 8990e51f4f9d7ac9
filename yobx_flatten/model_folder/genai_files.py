"""Write the configuration files of onnxruntime-genai: ``genai_config.json`` and ``audio_processor_config.json``."""

# decoder       model                              the file of every layout
# Whisper       encoder, decoder                   layout="genai": a different split, see `pieces/genai`
# LLaVA         vision_encoder, embedding,         layout="genai": one additional file, see `pieces/genai`
#               decoder_model_merged

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import InvalidArgumentError
from ..export.proof.report import ExportReport
from ..huggingface.cache_names import CACHE, PRESENT
from ..registry.recipe.aliases import TransformersModel
from .export_piece import FolderOptions
from .pieces.genai import ALLOWED, EMBEDDING
from .pieces.vision_language import image_token_of
from .source.configuration import write_json


def write_genai_files(
    folder: pathlib.Path,
    model: TransformersModel,
    task: str,
    reports: Mapping[str, ExportReport],
    shared: Collection[str],
    options: FolderOptions,
) -> None:
    """Write configuration files if onnxruntime-genai can run the files; else refuse ``layout="genai"``."""
    is_asked, contents = options.layout == "genai", None
    if task == "text-generation":
        contents = decoder_config(model, reports["model.onnx"].input_names, shared=shared)
    elif is_asked and task == "automatic-speech-recognition":
        contents = sound_config(model, reports["decoder.onnx"].output_names)
        # the values of Whisper's own processor: windows of 25 ms every 10 ms, of sound at 16 kHz
        mel = {"chunk_size": 30, "hop_length": 160, "n_fft": 400, "n_mel": model.config.num_mel_bins}
        steps = [
            {"name": "audio_decoder", "type": "AudioDecoder"},
            {"name": "STFT", "type": "STFTNorm", "attrs": {"n_fft": 400, "frame_length": 400, "hop_length": 160}},
            {"name": "log_mel_spectrogram", "type": "LogMelSpectrum", "attrs": mel},
        ]
        sequence = [{"operation": step} for step in steps]
        write_json(folder / "audio_processor_config.json", {"feature_extraction": {"sequence": sequence}})
    elif is_asked:
        text, inputs = model.config.get_text_config(decoder=True), reports["decoder_model_merged.onnx"].input_names
        contents = decoder_config(model, inputs, shared=shared, config=text)
        if contents is not None:
            vision = {"inputs": {"pixel_values": "pixel_values"}, "outputs": {"image_features": "image_features"}}
            both = {"input_ids": "input_ids", "image_features": "image_features"}
            embedding = {"inputs": both, "outputs": {"inputs_embeds": "inputs_embeds"}}
            contents["model"]["decoder"]["filename"] = "decoder_model_merged.onnx"
            # the library runs the same loop for all of its types with a picture file, an embedding file and a decoder
            contents["model"] |= {
                "type": "gemma3",
                "image_token_id": image_token_of(model),
                "vision": {"filename": "vision_encoder.onnx", **vision},
                "embedding": {"filename": f"{EMBEDDING}.onnx", **embedding},
            }
    if contents is not None:
        write_json(folder / "genai_config.json", contents)
    elif is_asked:
        way = "" if options.optimize else ', or pass optimize="onnxruntime", which keeps keys of all tokens'
        raise InvalidArgumentError(
            f"onnxruntime-genai 0.18 does not run this {type(model).__qualname__}: the library only has caches that "
            f'keep all tokens. Leave layout="genai" out{way}.'
        )


def _contents(
    model: TransformersModel, kind: str, vocabulary: int, room: int, files: Mapping[str, Any], *, one_memory: bool
) -> dict[str, Any]:
    # files: the entry of each file; one_memory: whether the library updates the cache in place
    config, generation = model.config.get_text_config(decoder=True), model.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    pad = first_end if config.pad_token_id is None else config.pad_token_id
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": pad}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    search = {"do_sample": False, "num_beams": 1, "max_length": room, "past_present_share_buffer": one_memory}
    return {
        "model": {"type": kind, **tokens, "context_length": room, "vocab_size": vocabulary, **files},
        "search": {**search, "temperature": 1.0, "top_k": 1, "top_p": 1.0},
    }


def _cache_names(what: str, front: str, side: str = "") -> dict[str, str]:
    return {f"{what}_{part}_names": f"{front}.%d.{side}{part}" for part in ("key", "value")}


def _session(file: str) -> dict[str, Any]:
    return {"session_options": {"log_id": "onnxruntime-genai", "provider_options": []}, "filename": file}


def decoder_config(
    model: TransformersModel, inputs: Sequence[str], *, shared: Collection[str] = (), config: Any = None
) -> dict[str, Any] | None:
    # config: the configuration of the decoder; by default the configuration of the model
    # shared: inputs that may share their memory with an output; the library updates the cache in place if all cache
    # inputs are shared
    # returns: `None` for a model that onnxruntime-genai 0.18 cannot run: its cache has only keys and values, and one
    # key for each token, which a sliding-window layer does not keep
    config = model.config if config is None else config
    fed = {f"{CACHE}.{index}.{part}" for index in range(config.num_hidden_layers) for part in ("key", "value")}
    plain = [name for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids") if name in inputs]
    one_memory = fed == set(shared)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    slides = bool(getattr(config, "sliding_window", None)) and "sliding_attention" in kinds
    if set(inputs) != fed | set(plain) or (slides and not one_memory):
        return None
    room, heads = getattr(config, "max_position_embeddings", None) or 2048, config.num_attention_heads
    decoder = {
        **_session("model.onnx"),
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "inputs": {**{name: name for name in plain}, **_cache_names("past", CACHE)},
        "outputs": {"logits": "logits", **_cache_names("present", PRESENT)},
    }
    # "decoder" is the general type: the library has no own types for most decoders
    return _contents(model, "decoder", config.vocab_size, room, {"decoder": decoder}, one_memory=one_memory)


def sound_config(model: TransformersModel, outputs: Sequence[str]) -> dict[str, Any]:
    # the encoder file returns keys and values for each layer and head of the decoder
    config, heads, layers = model.config, model.config.decoder_attention_heads, model.config.decoder_layers

    def side(file: str) -> dict[str, Any]:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
        return {**_session(file), "head_size": config.d_model // heads, "hidden_size": config.d_model, **sizes}

    caches = {**_cache_names("past", CACHE, "decoder."), **_cache_names("cross_past", CACHE, "encoder.")}
    present = _cache_names("cross_present", PRESENT, "encoder.")
    encoder = {
        **side("encoder.onnx"),
        "inputs": {"audio_features": "input_features"},
        "outputs": {"encoder_hidden_states": "last_hidden_state", **present},
    }
    logits = {"logits": ALLOWED if ALLOWED in outputs else "logits"}
    decoder = {
        **side("decoder.onnx"),
        "inputs": {"input_ids": "input_ids", **caches},
        "outputs": {**logits, **_cache_names("present", PRESENT, "decoder.")},
    }
    files, room = {"encoder": encoder, "decoder": decoder}, config.max_target_positions
    return _contents(model, "whisper", config.vocab_size, room, files, one_memory=False)
