"""Refuse or name inputs of a model's forward that its folder would not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

from ...errors import GenerationError
from ...huggingface.cache_names import argument_of
from ...recipe.aliases import TransformersModel

# pictures and sound, as models call them: `image_pixel_values` of Phi 4, `image_patches` of Fuyu
_MEDIA = re.compile(r"(.*_)?(pixel_values|input_features|input_values|flattened_patches|image_patches)(_.*)?")

# what a call without them has a value for, or what asks for other outputs: positions, masks, labels, options
_NO_DATA = re.compile(
    r"input_ids|inputs_embeds|token_type_ids|position_ids|(?!pixel_mask|attention_mask).*_mask|.*mask_.*|.*labels?|"
    r"(start|end)_positions|p_mask|"
    r"is_impossible|cls_index|loss_.*|return_.*|output_.*|use_.*|training|encoder_.*|decoder_.*|cross_.*|"
    r"interpolate_.*|.*cache.*|mems|logits_to_keep|kwargs|cu_seq.*|max_(length|seq).*|mm_.*|"
    r"past_.*|state|shared_kv_states|per_layer_inputs|bool_masked_pos|noise|speaker_id|speaking_rate|perm_mask|target_mapping|cls_idx|num_.*"
)


def check_other_media(model: TransformersModel, task: str) -> None:
    """Refuse a model that reads pictures or sound next to the one input that the files of its task take."""
    takes = inspect.signature(model.forward).parameters
    lost = [name for name in takes if _MEDIA.fullmatch(name) and name != model.main_input_name]
    if lost and model.main_input_name != "inputs":  # of a speech encoder-decoder, which is one of the others
        raise GenerationError(
            f"{type(model).__qualname__} reads {', '.join(lost)} next to {model.main_input_name}, and the files for "
            f"{task} take {model.main_input_name} alone. Export the calls of a run, with record_calls(model) as calls: "
            f"model.generate(...), or what it does without, with export_folder(..., task={task!r})."
        )


def note_on_other_inputs(model: TransformersModel, names: Collection[str]) -> list[str]:
    """Return a note on data that a model also takes and that the file does not; none where there are none."""
    takes = inspect.signature(model.forward).parameters.values()
    others = [one.name for one in takes if "Tensor" in str(one.annotation) and not _NO_DATA.fullmatch(one.name)]
    others = [name for name in others if name not in names and name != argument_of(model.forward)]
    if not others:
        return []
    return [
        f"{type(model).__qualname__} also takes {', '.join(others)}, and the file is exported without them. With "
        "them: export_onnx(model, kwargs=inputs, path=...)"
    ]
