"""Plan an exported folder (files, checks, texts) before the export, and refuse unsupported models."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import torch

from ..core.compare import WEIGHT_TYPES
from ..core.effects import undisturbed
from ..core.files.document import read_text
from ..errors import InvalidArgumentError, ModelSourceError
from ..export.model_facts import ModelFacts
from ..export.onnx.weights import holds_integers
from ..export.proof.eager_runs import Proof, choose_proof
from ..export.proof.report import ExportReport
from ..export.quantization import Quantization, WeightBits, choose_quantization, reads_once
from ..export.runtimes.write import check_room, has_kernels
from ..generate.settings import settings_of
from ..huggingface.decoders import rereads_at_switch, switch_of
from ..registry.recipe.aliases import TransformersModel
from ..runners.adapters import Adapter
from .client_layout import check_layout
from .export_piece import FolderOptions
from .pieces import vision_language as vision
from .pieces.genai import FRAMES
from .pieces.tasks import GENERATES, SPEAKS, pieces_for, task_of
from .pieces.text import Piece, Split
from .sentence import SentenceModel, read_modules
from .source.adapter import read_adapters
from .source.configuration import check_class, note_on_head
from .source.open import OpenedModel
from .texts import answered, chat_prompts, encoder_rows, python_text, sentence_case

_CHATS = 10  # number of prompts for which the answers of a quantized file are compared with the model's
# number of text rows on which a quantized file is measured; 2 for larger models, for which no answers are compared
_ROWS = {"full": 8, "standard": 4}
_ROUNDING = 24  # number of further text rows for the rounding of weights to 4 bits
_MOST_PROMPTS = 2**24  # bytes of a file of prompts


@dataclasses.dataclass(frozen=True)
class FolderPlan:
    options: FolderOptions
    opened: OpenedModel
    source: pathlib.Path | None  # folder from which tokenizer and processor are copied; `None` if unknown
    dtype: str  # type of the weights
    proof: Proof  # `"full"`, `"standard"`, `"sample"` or `"none"`
    task: str
    pieces: list[Piece]
    # sentence-transformers modules after the model, empty for other folders; or why the files have no embedding
    modules: Sequence[torch.nn.Module] | str
    quantization: Quantization | None
    timed: ExportReport  # the time that making the inputs took
    text: str = ""  # description of the text on which the perplexity is measured
    chats: dict[str, torch.Tensor] | None = None  # prompts whose answers are compared
    switch: int | None = None  # the length of text at which the rotary angles change; `None` for other models
    rereads: bool | None = None  # whether `model.generate` reads all tokens again at that length; `None` if unknown
    adapters: Sequence[Adapter] = ()  # the adapters that the files can switch between

    @property
    def model(self) -> TransformersModel:
        return self.opened.model

    @property
    def bits(self) -> WeightBits | None:
        return None if self.quantization is None else self.quantization.weights

    @property
    def is_whole(self) -> bool:
        return self.proof in _ROWS

    def sliding_piece(self) -> Piece:
        """Return the decoder to export with a KV cache that drops tokens outside the sliding window."""
        (piece,) = _cut(self.model, self.task, self.task, self.options, self.proof, whole_cache=False)[1]
        return piece


def plan_folder(opened: OpenedModel, folder: pathlib.Path, options: FolderOptions) -> FolderPlan:
    task, adapters = options.task, options.adapters
    if adapters is not None and opened.is_streamed:
        opened = opened.as_a_whole("adapters need its layers in memory")
    model = opened.model
    source = opened.folder if options.source is None else pathlib.Path(options.source)
    dtype, facts = str(model.dtype).removeprefix("torch."), ModelFacts.of(model)
    proof = choose_proof(options.proof, facts.weight_bytes)
    own_task = task_of(model)
    if options.largest is not None:
        options.largest.check_positions(model)
    if dtype not in WEIGHT_TYPES or (options.name == "onnx" and proof != "none" and not has_kernels(dtype)):
        raise InvalidArgumentError(
            f"onnxruntime has no CPU kernels for weights of {dtype}. Use float32 or float16, or to='program'. "
            'If another execution provider will run the files, skip the checks: proof="none"'
        )
    if own_task in GENERATES and getattr(model, "generation_config", None) is not None:
        settings_of(model.config.to_dict(), model.generation_config.to_dict())  # raises for unsupported settings
    quantization, prompts = _quantization(options, own_task, facts, has_integers=opened.has_integers)
    timed = ExportReport(facts.name)
    with timed.timed("inputs"):
        while True:
            check_room(facts, folder, in_memory=0 if proof == "none" else 1, quantization=quantization, proof=proof)
            try:
                with undisturbed(model=model):  # a model may store rotary angles for the longest text that it has read
                    task, pieces = _cut(model, own_task, task, options, proof, whole_cache=options.optimize is not None)
                break
            except RuntimeError as error:
                if not opened.is_streamed or "meta" not in str(error):
                    raise
                opened = opened.as_a_whole("a weight is read where its layer is not called")
                model, facts = opened.model, ModelFacts.of(opened.model)
    opened = dataclasses.replace(opened, remarks=(*opened.remarks, *note_on_head(model, own_task, options.task)))
    modules = read_modules(source)
    is_encoder = task == "feature-extraction" and "input_ids" in pieces[0].kwargs
    if modules and not isinstance(modules, str) and is_encoder:
        module = SentenceModel(model, modules).eval()
        pieces = [dataclasses.replace(piece, module=module) for piece in pieces]
    plan = FolderPlan(options, opened, source, dtype, proof, task, pieces, modules, quantization, timed=timed)
    plan = _with_encoder_text(_with_text(plan, prompts))
    if task == "text-generation":
        switch = switch_of(model.config.get_text_config(decoder=True).to_dict())
        rereads = None if switch is None else rereads_at_switch(model, switch)
        plan = dataclasses.replace(plan, switch=switch, rereads=rereads)
    check_layout(options.layout, options.name, task, plan.bits, dtype)
    if adapters is None:
        return plan
    in_place = options.layout in ("flat", "genai")
    if options.runtime != "onnxruntime" or not in_place or task in SPEAKS:
        found = task if in_place else f"layout={options.layout!r}"
        found = found if options.runtime == "onnxruntime" else options.runtime
        raise InvalidArgumentError(
            "adapters= needs onnxruntime, layout 'flat' or 'genai', and a model that does not generate speech; found "
            f"{found}. Merge the adapter instead: export_folder(ADAPTER_FOLDER, folder)"
        )
    return dataclasses.replace(plan, adapters=read_adapters(model, adapters))


def _cut(
    model: TransformersModel, own_task: str, task: str, options: FolderOptions, proof: Proof, *, whole_cache: bool
) -> tuple[str, list[Piece]]:
    every = proof if options.largest is None else "full"  # later, `fitting_cases` leaves out cases beyond the bounds
    for_genai = options.layout == "genai"
    if for_genai:
        check_genai(model, own_task if task == "auto" else task)
    check_class(model, own_task, task)
    split = Split(options.batch, whole_cache, options.logits, every, options.word_times, for_genai)
    return pieces_for(model, task, split)


_TILES = "its pictures are cut into tiles, which onnxruntime-genai does in another way"
# why onnxruntime-genai does not run a model with this encoder or decoder
_OTHER_WAYS: dict[type[torch.nn.Module], str] = {
    vision.GridVisionEncoder: "its image tokens have 3D positions, which onnxruntime-genai computes differently",
    vision.TiledVisionEncoder: _TILES,
    vision.NestedVisionEncoder: _TILES,
    vision.BlockwiseDecoder: "its image tokens attend to each other, and onnxruntime-genai passes no token types",
    vision.DeepstackDecoder: "its decoder also adds image features between layers",
}


def check_genai(model: TransformersModel, task: str) -> None:
    name, config = type(model).__qualname__, model.config
    why: str | None = f"it has no type for {task}"
    if task == "text-generation":
        why = None
    elif task == "image-text-to-text":
        why = next((_OTHER_WAYS[kind] for kind in vision.vision_modules(model) if kind in _OTHER_WAYS), None)
    elif task == "automatic-speech-recognition":
        fits = config.model_type == "whisper" and config.max_source_positions * 2 == FRAMES
        only = f"the only audio model it runs is Whisper with {FRAMES} frames (max_source_positions=1500)"
        why = None if fits else only
    elif task == "text2text-generation":
        why = "its only text encoder-decoder type, marian-ssru, has a recurrent decoder"
    elif task == "image-to-text":
        why = "it has no type for image encoder-decoders with cross-attention"
    if why is not None:
        raise InvalidArgumentError(
            f'onnxruntime-genai 0.18 does not run the files of a {name}: {why}. Leave layout="genai" out.'
        )


def _quantization(
    options: FolderOptions, own_task: str, facts: ModelFacts, *, has_integers: bool
) -> tuple[Quantization | None, tuple[str, ...]]:
    # returns: also the prompts in the file `calibration=`
    # without "keep", weights that are stored as integers would become floats
    asked = options.quantize
    if asked is None and has_integers and options.runtime == "onnxruntime":
        asked = "keep"
    if asked is not None and own_task in SPEAKS:
        raise InvalidArgumentError(
            f"quantize= is not supported for {facts.name}: rounding errors would add up from frame to frame, and their "
            'effect on the sound is not measured. Leave quantize= out, or pass dtype="float16".'
        )
    quantization = choose_quantization(asked, facts, "export_folder", options.runtime)
    prompts: tuple[str, ...] = ()
    if options.calibration is not None:
        path = pathlib.Path(options.calibration)
        lines = read_text(path, failure=ModelSourceError, most=_MOST_PROMPTS).splitlines()
        prompts = tuple(line.strip() for line in lines if line.strip())
        if not prompts:
            raise ModelSourceError(f"{path} contains no prompts. Write one prompt per line.")
    has_text = quantization is not None and quantization.tokens is not None
    if prompts and (quantization is None or has_text or options.logits == "last"):
        raise InvalidArgumentError(
            "calibration= (--calibration) needs quantize=, and cannot be combined with tokens= of a Quantization or "
            'with logits="last".'
        )
    if has_text and options.logits == "last":
        raise InvalidArgumentError(
            'Quantization(tokens=...) needs the logits of all tokens: leave tokens= or logits="last" out.'
        )
    return quantization, prompts


def _with_text(plan: FolderPlan, prompts: tuple[str, ...]) -> FolderPlan:
    """Return a copy of a plan with text and chat prompts added, which measure the quality of quantized weights."""
    quantization, options, model = plan.quantization, plan.options, plan.model
    generates = plan.task == "text-generation"
    if quantization is None or quantization.tokens is not None or not generates or options.logits != "all":
        if prompts:
            raise InvalidArgumentError(
                f"calibration= (--calibration) is for models that generate text, not for {plan.task}."
            )
        text = "a text"
    else:
        rows = _ROWS.get(plan.proof, 2) if options.batch is None else options.batch
        tokens = python_text(model, plan.source, rows, "\n".join(prompts))
        if prompts and tokens is None:
            raise InvalidArgumentError(
                f"{options.calibration} has fewer than 16 tokens, or tokens outside the vocabulary of "
                f"{type(model).__qualname__}. Give more text, or the model's tokenizer."
            )
        most = options.largest
        if tokens is not None and most is not None and most.length is not None and most.new is not None:
            tokens = tokens[:, : min(most.length, most.new + 1)]  # one token in the cache, and all others in one call
        quantization = dataclasses.replace(quantization, tokens=tokens)
        text = "sources of Python" if options.calibration is None else pathlib.Path(options.calibration).name
    chats = None
    any_size = options.batch is None and options.largest is None
    if quantization is not None and generates and plan.is_whole and any_size:
        chats = chat_prompts(model, plan.source, _CHATS, prompts)
    plan = dataclasses.replace(plan, quantization=quantization, text=text, chats=chats)
    if quantization is None or quantization.tokens is None or quantization.calibration is not None:
        return plan
    if quantization.weights == "keep" or options.runtime != "onnxruntime" or plan.proof == "none":
        return plan
    # text by which a decoder's weights are rounded: chats and source code of Python
    tokens, rows = quantization.tokens, options.batch or 1
    more = python_text(model, plan.source, len(tokens) + _ROUNDING)
    texts = [tokens.flatten()] if prompts else []
    texts += [] if more is None else [more[0 if prompts else len(tokens) :].flatten()]
    chats = chat_prompts(model, plan.source, _CHATS, prompts)
    if chats is not None:
        # weights that were integers are not rounded again, and a large model would take minutes to answer
        draws = plan.is_whole and not plan.opened.is_streamed and not holds_integers(model)
        pairs = zip(chats["input_ids"], chats["attention_mask"], strict=True)
        with plan.timed.timed("inputs"):
            texts = (answered(model, chats) if draws else [row[mask == 1] for row, mask in pairs]) + texts
    whole, length = torch.cat(texts) if texts else torch.zeros(0, dtype=torch.int64), tokens.shape[1]
    count = len(whole) // length // rows * rows  # a multiple of the rows of a call
    found = whole[: count * length].reshape(count, length) if count else None
    return dataclasses.replace(plan, quantization=dataclasses.replace(quantization, calibration=found))


def _with_encoder_text(plan: FolderPlan) -> FolderPlan:
    """Return a copy of an encoder's plan with text added, by which weights are quantized and files are tested."""
    quantization, options, model = plan.quantization, plan.options, plan.model
    is_rounded = quantization is not None and quantization.weights != "keep" and options.runtime == "onnxruntime"
    if quantization is None or not is_rounded or plan.proof == "none" or len(plan.pieces) > 1:
        return plan
    (piece,) = plan.pieces
    flat = all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in piece.kwargs.values())
    if not reads_once(piece.kwargs) or not flat or quantization.tokens is not None:
        return plan
    rows = encoder_rows(model, plan.source, options.batch or len(piece.kwargs["input_ids"]))
    if rows is not None and quantization.calibration is None:
        quantization = dataclasses.replace(quantization, calibration=rows)
    sentences = sentence_case(model, plan.source, piece.kwargs, options.batch)
    if sentences is not None and isinstance(piece.module, SentenceModel):
        piece = dataclasses.replace(piece, cases=[*piece.cases, sentences])
    return dataclasses.replace(plan, quantization=quantization, pieces=[piece])
