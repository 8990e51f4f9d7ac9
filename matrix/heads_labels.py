"""The labels of each task, in the forms that there are; and the same batch where some rows have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["labels_of", "without_some"]

Batch = dict[str, Any]
_IGNORED = -100
_OBJECTS = (2, 0, 3, 1, 2)


def labels_of(task: str, model: Any, inputs: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """Yield labels that a model may take for these inputs, likeliest first.

    Args:
        task: the task of its head.
        model: the model.
        inputs: what it reads.
        generator: the generator of the numbers.
    """
    if not inputs:  # nothing is known that the class reads
        return
    maker = _Labels(model, inputs, generator)
    for form in (*_FORMS.get(task, ()), *_BY_ARGUMENT):
        yield from form(maker)


class _Labels:
    def __init__(self, model: Any, inputs: Batch, generator: torch.Generator) -> None:
        self.model, self.inputs, self.generator = model, inputs, generator
        self.taken = inspect.signature(model.forward).parameters
        self.rows = len(next(iter(inputs.values())))
        self._outputs: Any = None

    @property
    def outputs(self) -> Any:
        """What the model returns without labels."""
        if self._outputs is None:
            with torch.no_grad():
                self._outputs = self.model(**self.inputs)
        return self._outputs

    def integers(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), (self.rows, *shape), generator=self.generator)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn((self.rows, *shape), generator=self.generator)

    def spread(self, labels: torch.Tensor, ignored: int = _IGNORED) -> torch.Tensor:
        """Labels of which each row has another number."""
        labels = labels.clone()
        for row in range(self.rows):
            count = (row * 5 + 2) % labels[row].numel()
            places = torch.randperm(labels[row].numel(), generator=self.generator)[:count]
            labels[row].view(-1)[places] = ignored
        return labels


def _tokens(maker: _Labels) -> Iterator[Batch]:
    """The tokens themselves: of a language model."""
    held = next((maker.inputs[key] for key in ("decoder_input_ids", "input_ids") if key in maker.inputs), None)
    if held is None or held.is_floating_point() or "labels" not in maker.taken:
        return
    seen = maker.inputs.get("visual_embeds")
    if seen is not None:  # what is seen stands after the text
        held = torch.cat([held, held[:, :1].expand(-1, seen.shape[1])], 1)
    labels = maker.spread(held)
    mask = maker.inputs.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        labels[mask == 0] = _IGNORED
    yield {"labels": labels}


def _written(maker: _Labels) -> Iterator[Batch]:
    """All tokens, for a model that embeds its labels."""
    if "input_ids" in maker.inputs and "labels" in maker.taken:
        yield {"labels": maker.inputs["input_ids"].clone()}


def _classes(maker: _Labels) -> Iterator[Batch]:
    """A class for each row."""
    name = "target_values" if "target_values" in maker.taken else "labels"
    if name in maker.taken:
        if "xvector" in type(maker.model).__name__.lower():  # its outputs are vectors, and not of classes
            yield {name: maker.integers(int(maker.model.config.num_labels))}
            return
        logits = getattr(maker.outputs, "logits", None)
        if logits is None:
            logits = getattr(maker.outputs, "prediction_outputs", None)
        count = logits.shape[-1] if logits is not None else 2
        problem = getattr(maker.model.config, "problem_type", None)
        if problem == "regression":
            yield {name: maker.random()}
        elif problem == "multi_label_classification":
            yield {name: maker.integers(2, count).float()}
        else:
            yield {name: maker.integers(count)}


def _token_classes(maker: _Labels) -> Iterator[Batch]:
    logits = maker.outputs.logits
    if logits.dim() == 3:
        yield {"labels": maker.spread(maker.integers(logits.shape[-1], logits.shape[1]))}


def _frame_classes(maker: _Labels) -> Iterator[Batch]:
    logits = maker.outputs.logits
    if logits.dim() == 3:
        labels = maker.integers(logits.shape[-1], logits.shape[1])
        yield {"labels": torch.nn.functional.one_hot(labels, logits.shape[-1])}
        yield {"labels": maker.spread(labels)}


def _span(maker: _Labels) -> Iterator[Batch]:
    """Where an answer begins and ends; one lies outside of what is read."""
    if "start_positions" not in maker.taken:
        return
    length = next((value.shape[1] for key, value in maker.inputs.items() if key == "input_ids"), 8)
    start, end = maker.integers(length - 3), maker.integers(length, low=length - 3)
    end[-1] = length + 20
    yield {"start_positions": start, "end_positions": end}


def _sentences(maker: _Labels) -> Iterator[Batch]:
    """Tokens, and whether texts follow one another: two losses."""
    for name in ("next_sentence_label", "sentence_order_label", "sentence_image_labels", "matched_label"):
        if name in maker.taken:
            for tokens in _tokens(maker):
                yield {**tokens, name: maker.integers(2)}
            yield {name: maker.integers(2)}


def _speech_text(maker: _Labels) -> Iterator[Batch]:
    """Texts of several lengths."""
    if "labels" in maker.taken:
        high = min(int(getattr(maker.model.config, "vocab_size", 30) or 30), 100)
        labels = maker.integers(high, 5, low=3)
        for row in range(maker.rows):
            labels[row, 2 + row % 4 :] = _IGNORED
        yield {"labels": labels}
        yield {"labels": maker.integers(high, 5, low=3)}


def _transduced(maker: _Labels) -> Iterator[Batch]:
    """Texts, and the same after a blank: what the decoder has read before each of its tokens."""
    for made in _speech_text(maker):
        before = made["labels"].clamp(min=0)
        yield {**made, "decoder_input_ids": torch.cat([torch.zeros_like(before[:, :1]), before], 1)}


def _map(maker: _Labels) -> Iterator[Batch]:
    """A class for each place of a picture."""
    pixels = maker.inputs["pixel_values"]
    config = maker.model.config
    ignored = int(getattr(config, "semantic_loss_ignore_index", 255) or 255)
    labels = maker.integers(int(config.num_labels), *pixels.shape[-2:])
    yield {"labels": maker.spread(labels, ignored)}
    yield {"labels": labels}


def _depth(maker: _Labels) -> Iterator[Batch]:
    outputs = maker.outputs
    found = next((v for v in outputs.values() if isinstance(v, torch.Tensor) and v.dim() >= 3), None)
    if found is not None:
        yield {"labels": maker.random(*found.shape[1:]).abs() + 0.1}
    pixels = maker.inputs["pixel_values"]
    yield {"labels": maker.random(*pixels.shape[-2:]).abs() + 0.1}


def _objects(maker: _Labels) -> Iterator[Batch]:
    """Boxes with a class, another number in each row."""
    count = int(maker.model.config.num_labels)
    height, width = maker.inputs["pixel_values"].shape[-2:]
    made: list[dict[str, torch.Tensor]] = []
    for row in range(maker.rows):
        objects = max(_OBJECTS[row % len(_OBJECTS)], 1)
        made.append(
            {
                "class_labels": torch.randint(0, count, (objects,), generator=maker.generator),
                "boxes": 0.2 + 0.3 * torch.rand((objects, 4), generator=maker.generator),
                "masks": (torch.rand((objects, height, width), generator=maker.generator) > 0.5).float(),
            }
        )
    yield {"labels": [{key: one[key] for key in ("class_labels", "boxes")} for one in made]}
    yield {"labels": made}


def _instances(maker: _Labels) -> Iterator[Batch]:
    """Masks with a class, another number in each row."""
    if "mask_labels" not in maker.taken:
        return
    count = int(maker.model.config.num_labels)
    height, width = maker.inputs.get("pixel_values", maker.inputs.get("pixel_values_videos")).shape[-2:]
    objects = [1 + row % 3 for row in range(maker.rows)]
    yield {
        "mask_labels": [(torch.rand((n, height, width), generator=maker.generator) > 0.5).float() for n in objects],
        "class_labels": [torch.randint(0, count, (n,), generator=maker.generator) for n in objects],
    }


def _pairs(maker: _Labels) -> Iterator[Batch]:
    if "return_loss" in maker.taken:
        yield {"return_loss": True}


def _future(maker: _Labels) -> Iterator[Batch]:
    """The future values of a series."""
    if "future_values" in maker.taken:
        shape = maker.inputs["past_values"].shape[2:]
        length = int(
            getattr(maker.model.config, "prediction_length", 0) or getattr(maker.model.config, "horizon_length", 8)
        )
        yield {"future_values": maker.random(length, *shape)}
    if "target_values" in maker.taken:
        found = getattr(maker.outputs, "regression_outputs", None)
        if found is not None:
            found = found[0] if isinstance(found, tuple) else found
            yield {"target_values": maker.random(*found.shape[1:])}


def _speech(maker: _Labels) -> Iterator[Batch]:
    """Spectrograms."""
    bins = int(getattr(maker.model.config, "num_mel_bins", 80))
    labels = maker.random(8, bins)
    for row in range(maker.rows):
        labels[row, 4 + 2 * (row % 3) :] = float(_IGNORED)
    made: Batch = {"labels": labels}
    if "decoder_input_values" in maker.taken:
        yield {
            **made,
            "speaker_embeddings": maker.random(int(getattr(maker.model.config, "speaker_embedding_dim", 512))),
        }
    yield made


def _masked_frames(maker: _Labels) -> Iterator[Batch]:
    """Which frames of a sound are hidden, and what they are distinguished from."""
    if "mask_time_indices" not in maker.taken:
        return
    name = next(name for name in ("input_values", "input_features") if name in maker.inputs)
    length = int(maker.model._get_feat_extract_output_lengths(maker.inputs[name].shape[1]))
    hidden = torch.zeros(maker.rows, length, dtype=torch.bool)
    for row in range(maker.rows):
        hidden[row, torch.randperm(length, generator=maker.generator)[: 2 + row % 2]] = True
    negatives = torch.randint(0, length, (maker.rows, length, 4), generator=maker.generator)
    negatives += torch.arange(maker.rows)[:, None, None] * length
    yield {"mask_time_indices": hidden, "sampled_negative_indices": negatives}


def _questions(maker: _Labels) -> Iterator[Batch]:
    """Several spans in each row, each of a question."""
    if "question_positions" in maker.taken:
        length = maker.inputs["input_ids"].shape[1]
        made = {key: maker.integers(length, 2) for key in ("question_positions", "start_positions", "end_positions")}
        made["start_positions"][0, 0] = made["end_positions"][0, 0] = 0  # one that is ignored
        yield made


def _attacked(maker: _Labels) -> Iterator[Batch]:
    """A text with mistakes, and the one that was meant."""
    if "attack_input_ids" in maker.taken:
        meant, made = {}, {}
        for key, value in maker.inputs.items():
            meant[f"labels_{key}"] = value.roll(1, -1) if key == "input_ids" else value
            made[f"attack_{key}"] = value.roll(2, -1) if key == "input_ids" else value
        yield {**made, **meant, "labels_input_ids": maker.spread(meant["labels_input_ids"])}


def _alike(maker: _Labels) -> Iterator[Batch]:
    """Whatever has the shape of the outputs."""
    if "labels" not in maker.taken:
        return
    for key in ("logits", "predicted_depth", "reconstruction", "pixel_values", "heatmaps"):
        found = getattr(maker.outputs, key, None)
        if isinstance(found, torch.Tensor):
            if found.dim() > 1:
                yield {"labels": maker.spread(maker.integers(found.shape[-1], *found.shape[1:-1]))}
            yield {"labels": maker.random(*found.shape[1:])}


def _nothing(maker: _Labels) -> Iterator[Batch]:
    """A loss without labels: of what was hidden."""
    yield {}


Form = Callable[[_Labels], Iterator[Batch]]
_FORMS: dict[str, tuple[Form, ...]] = {
    **dict.fromkeys(
        (
            "sequence_classification",
            "audio_classification",
            "audio_xvector",
            "image_classification",
            "multiple_choice",
            "next_sentence_prediction",
            "time_series_classification",
            "video_classification",
        ),
        (_classes,),
    ),
    "visual_question_answering": (_tokens, _written, _classes),  # of answers that are written, or chosen
    **dict.fromkeys(("causal_lm", "masked_lm", "image_text_to_text", "seq_to_seq_causal_lm"), (_tokens,)),
    "audio_frame_classification": (_frame_classes,),
    "ctc": (_speech_text,),
    "depth_estimation": (_depth,),
    "document_question_answering": (_span,),
    "image_segmentation": (_objects,),
    "instance_segmentation": (_instances,),
    "object_detection": (_objects,),
    "pretraining": (_questions, _attacked, _sentences, _masked_frames),
    **dict.fromkeys(("rnnt", "tdt"), (_transduced, _speech_text)),
    "question_answering": (_span,),
    "semantic_segmentation": (_map,),
    "speech_seq_2_seq": (_tokens, _speech_text),
    "text_to_spectrogram": (_speech,),
    "token_classification": (_token_classes,),
    "universal_segmentation": (_instances,),
    "zero_shot_object_detection": (_objects,),
}
# for tasks with many kinds of heads, and where the task does not state it
_BY_ARGUMENT: tuple[Form, ...] = (
    _sentences,
    _span,
    _pairs,
    _instances,
    _masked_frames,
    _future,
    _tokens,
    _classes,
    _speech_text,
    _alike,
    _nothing,
)


def without_some(model: Any, batch: Batch, labels: Batch) -> Batch:
    """Return the batch with no labels of any kind in its first two rows, as far as a kind can be left out.

    Args:
        model: the model.
        batch: the batch.
        labels: those of its arguments that are labels.
    """
    made = dict(batch)
    for name, value in labels.items():
        if name in ("start_positions", "end_positions"):
            outside = value.clone()
            if name == "start_positions":
                outside[:2] = 10_000
            made[name] = outside
        elif isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool:
            ignored = _IGNORED
            if value.dim() == 3 and "pixel_values" in batch:
                ignored = int(getattr(model.config, "semantic_loss_ignore_index", 255) or 255)
            without = value.clone()
            without[:2] = ignored
            made[name] = without
    if "bool_masked_pos" in batch and batch["pixel_values"].dim() == 4:
        hidden = batch["bool_masked_pos"].clone()
        hidden[:2] = False
        made["bool_masked_pos"] = hidden
    return made
