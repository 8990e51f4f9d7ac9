"""Define once how a class comes apart; export it, run it, store it.

``torch.export`` takes apart what is registered: lists, dicts and little else. Inside this block it takes apart the
caches of transformers, too, and one program serves all lengths::

    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))

``export_program`` and ``export_onnx`` do the same and replay the result against the eager model.
"""

from __future__ import annotations

# what a thing is made of, in one line
from .describe import string_type

# what can go wrong
from .errors import (
    AlreadyRegisteredError,
    CacheStructureError,
    DynamicShapesError,
    FlattenError,
    InvalidArgumentError,
    InvalidRegistrationError,
    MissingDependencyError,
    NotRegisteredError,
    ReplayError,
    RoundTripError,
    SpecMismatchError,
    StaticDataError,
    UnsupportedLayerError,
)

# export with proof
from .export import ExportedModel, export_onnx, export_program

# caches and outputs of transformers: build them, take them apart, put them together
from .huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from .huggingface.caches import (
    flatten_dynamic_cache,
    flatten_encoder_decoder_cache,
    flatten_static_cache,
    flatten_with_keys_dynamic_cache,
    flatten_with_keys_encoder_decoder_cache,
    flatten_with_keys_static_cache,
    unflatten_dynamic_cache,
    unflatten_encoder_decoder_cache,
    unflatten_static_cache,
)
from .huggingface.cases import DecodeSizes, decode_inputs
from .huggingface.known import WRONG_REGISTRATIONS
from .huggingface.outputs import (
    flatten_base_model_output,
    flatten_with_keys_base_model_output,
    unflatten_base_model_output,
)

# the Flattening List
from .listing import FlatteningRow, flattening_list
from .replay import Case, CaseResult
from .report import ExportReport

# register classes, and the block to export in
from .scopes import (
    Undo,
    make_flattening_function_for_dataclass,
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)

# which sizes vary
from .shapes import check_dynamic_shapes, dynamic_shapes, make_dynamic_shapes_kv_cache

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 # grouped by task, not by the alphabet
    # register classes, and the block to export in
    "register_class_flattening",
    "unregister_class_flattening",
    "make_flattening_function_for_dataclass",
    "register_cache_flattening",
    "unregister_cache_flattening",
    "register_flattening_functions",
    "Undo",
    "WRONG_REGISTRATIONS",
    "flattening_list",
    "FlatteningRow",
    # export with proof
    "export_program",
    "export_onnx",
    "ExportedModel",
    "ExportReport",
    "Case",
    "CaseResult",
    "DecodeSizes",
    "decode_inputs",
    # which sizes vary
    "dynamic_shapes",
    "check_dynamic_shapes",
    "make_dynamic_shapes_kv_cache",
    # caches and outputs of transformers
    "make_dynamic_cache",
    "make_static_cache",
    "make_encoder_decoder_cache",
    "flatten_dynamic_cache",
    "flatten_with_keys_dynamic_cache",
    "unflatten_dynamic_cache",
    "flatten_static_cache",
    "flatten_with_keys_static_cache",
    "unflatten_static_cache",
    "flatten_encoder_decoder_cache",
    "flatten_with_keys_encoder_decoder_cache",
    "unflatten_encoder_decoder_cache",
    "flatten_base_model_output",
    "flatten_with_keys_base_model_output",
    "unflatten_base_model_output",
    # what a thing is made of
    "string_type",
    # what can go wrong
    "FlattenError",
    "InvalidArgumentError",
    "InvalidRegistrationError",
    "AlreadyRegisteredError",
    "NotRegisteredError",
    "RoundTripError",
    "SpecMismatchError",
    "StaticDataError",
    "CacheStructureError",
    "UnsupportedLayerError",
    "DynamicShapesError",
    "ReplayError",
    "MissingDependencyError",
    # and
    "__version__",
]
