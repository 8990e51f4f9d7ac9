"""Why a type does not pass in a runtime where the cause lies outside of this package, as far as it is known.

What is not here is listed in the page with the first line of its error.
"""

from __future__ import annotations

from .causes import CAUSES
from .page import cleaned

__all__ = ["RUNTIME_CAUSES", "cause_of"]

# beginning of the column, text of the error, types (none for all) -> cause
RUNTIME_CAUSES: dict[tuple[str, str, tuple[str, ...]], str] = {
    ("", "number that varies", ("deepseek_v4",)): (
        "the compressors of its cache count in integers of Python (`entry_count`), and these runtimes take tensors"
    ),
    ("OpenVINO", "Can't create dummy inputs", ("longcat_flash",)): (
        'OpenVINO 2026.4 cannot compile the file: "Can\'t create dummy inputs if argument shapes ranks are not equal"'
    ),
    ("OpenVINO", "Can not clone with new dims", ("dbrx",)): (
        "OpenVINO 2026.4 fails in the product of tokens with the matrices of the experts (`FullyConnected` of the CPU "
        'plugin: "Can not clone with new dims. Descriptor\'s shape: {4, 0 - ?, 96} ... provided: {1, 6, 96}")'
    ),
    ("ExecuTorch", "aten::polar.out", ("deepseek_v2", "llama4", "llama4_text")): (
        "its positions are complex numbers (`torch.polar`), for which ExecuTorch 1.5 has no kernels"
    ),
    ("ExecuTorch", "finite upper bound", ("jetmoe",)): (
        "splits rows by expert into sizes that are read from values (`expert_size.tolist()`, modeling_jetmoe.py, "
        "5.23): torch knows no largest one, and ExecuTorch plans memory for it"
    ),
    ("program", "", ("nemotron_h",)): (
        "one token is computed without `dt_limit`, and several with it (modeling_nemotron_h.py, 5.23): the model "
        "itself differs by 9e-5 between three tokens at once and one after the other"
    ),
}


def cause_of(name: str, column: str, why: str) -> str:
    """Return the cause of a failure, or what was reported.

    Args:
        name: the type.
        column: where it failed.
        why: first line of the error.
    """
    if column == "program" and name in CAUSES:
        return CAUSES[name]
    for (where, text, names), cause in RUNTIME_CAUSES.items():
        if column.startswith(where) and text in why and (not names or name in names):
            return cause
    return f"`{cleaned(why)}`"
