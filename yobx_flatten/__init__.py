"""Define once how a class is flattened; export it, run it, store it.

``torch.export`` flattens what is registered: lists, dicts and little else. Inside this context manager it also
flattens the caches of transformers, and one program serves all lengths::

    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))

``export_program`` and ``export_onnx`` do the same and replay the result against the eager model.
"""

from __future__ import annotations

# write a node the way JAX does
from .declare.decorators import (
    pytree_dataclass,
    register,
    register_pytree_node,
    register_pytree_node_class,
    register_pytree_with_keys,
    register_pytree_with_keys_class,
    static_field,
)

# the Flattening List
from .declare.listing import FlatteningRow, flattening_list

# classes that another library knows
from .declare.mirror import mirror

# register classes, and the block to export in
from .declare.scopes import (
    Undo,
    make_flattening_function_for_dataclass,
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)

# what is wrong with an object, an example, an error, a recipe
from .diagnose.conformance import check_recipe
from .diagnose.drawing import Drawing, DrawingRow, explain
from .diagnose.export_errors import Explanation, explain_error
from .diagnose.inputs import Finding, Findings, check_inputs
from .diagnose.opaque import Unregistered, find_unregistered
from .diagnose.spec_diff import Difference, compare_specs

# what can go wrong
from .errors import (
    AlreadyRegisteredError,
    CacheStructureError,
    DamagedFileError,
    DynamicShapesError,
    FlattenError,
    FolderExistsError,
    ForeignFileError,
    GenerationError,
    InvalidArgumentError,
    InvalidRegistrationError,
    MissingDependencyError,
    ModelSourceError,
    NotRegisteredError,
    RecordError,
    ReplayError,
    RoundTripError,
    SpecMismatchError,
    StaticDataError,
    StoredFileError,
    UnsetFieldError,
    UnsupportedLayerError,
)
from .export.onnx_export import export_onnx

# export with proof
from .export.program import ExportedModel, export_program
from .export.replay import Case, CaseResult
from .export.report import ExportReport

# generate with what was exported
from .generate.onnx_generator import OnnxGenerator
from .generate.program_generator import ProgramGenerator
from .generate.sampling import Sampling
from .generate.settings import GenerationSettings

# caches and outputs of transformers: build them, take them apart, put them together
from .huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from .huggingface.caches.functions import (
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
from .huggingface.outputs import (
    flatten_base_model_output,
    flatten_with_keys_base_model_output,
    unflatten_base_model_output,
)
from .huggingface.recipes import WRONG_REGISTRATIONS

# a model as a folder that generation tools open
from .model_folder.manifest import FolderManifest
from .model_folder.verify import FolderCheck, FolderReport, verify_folder
from .model_folder.write import ExportedFolder, export_folder

# flatten functions from the names of attributes
from .recipe.codegen import functions_from_fields

# record the calls of a running model
from .record.call import Call
from .record.calls import RecordedCalls
from .record.recorder import record_calls
from .record.replays import RecordReplay

# store nested values, and replay them
from .storage.builder import (
    MiniOnnxBuilder,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
)
from .storage.cases import StoredCase, load_case, save_case
from .storage.nested import load_nested, save_nested
from .storage.replay import CaseReport, OutputDifference, replay_case

# what a thing is made of, in one line
from .trees.describe import string_type

# the leaves of a thing, with what its axes mean
from .trees.leaf import Leaf, leaves

# which sizes vary
from .trees.shapes import check_dynamic_shapes, dynamic_shapes, make_dynamic_shapes_kv_cache

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 # grouped by task, not by the alphabet
    # register classes, and the block to export in
    "register_class_flattening",
    "unregister_class_flattening",
    "make_flattening_function_for_dataclass",
    "functions_from_fields",
    "register_cache_flattening",
    "unregister_cache_flattening",
    "register_flattening_functions",
    "Undo",
    "WRONG_REGISTRATIONS",
    "flattening_list",
    "FlatteningRow",
    # write a node the way JAX does
    "register",
    "register_pytree_node",
    "register_pytree_node_class",
    "register_pytree_with_keys",
    "register_pytree_with_keys_class",
    "pytree_dataclass",
    "static_field",
    # classes that another library knows
    "mirror",
    # record the calls of a running model
    "record_calls",
    "RecordedCalls",
    "Call",
    "RecordReplay",
    # export with proof
    "export_program",
    "export_onnx",
    "ExportedModel",
    "ExportReport",
    "Case",
    "CaseResult",
    "DecodeSizes",
    "decode_inputs",
    # store nested values, and replay them
    "save_nested",
    "load_nested",
    "MiniOnnxBuilder",
    "create_onnx_model_from_input_tensors",
    "create_input_tensors_from_onnx_model",
    "save_case",
    "load_case",
    "StoredCase",
    "replay_case",
    "CaseReport",
    "OutputDifference",
    # a model as a folder that generation tools open, and what generates with it
    "export_folder",
    "verify_folder",
    "ExportedFolder",
    "FolderReport",
    "FolderCheck",
    "FolderManifest",
    "OnnxGenerator",
    "ProgramGenerator",
    "Sampling",
    "GenerationSettings",
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
    "leaves",
    "Leaf",
    # diagnose: what is wrong with an object, an example, an error, a recipe
    "find_unregistered",
    "Unregistered",
    "explain",
    "Drawing",
    "DrawingRow",
    "check_inputs",
    "Findings",
    "Finding",
    "explain_error",
    "Explanation",
    "compare_specs",
    "Difference",
    "check_recipe",
    # what can go wrong
    "FlattenError",
    "InvalidArgumentError",
    "InvalidRegistrationError",
    "AlreadyRegisteredError",
    "NotRegisteredError",
    "RoundTripError",
    "SpecMismatchError",
    "StaticDataError",
    "UnsetFieldError",
    "CacheStructureError",
    "UnsupportedLayerError",
    "DynamicShapesError",
    "ReplayError",
    "RecordError",
    "StoredFileError",
    "DamagedFileError",
    "ForeignFileError",
    "GenerationError",
    "ModelSourceError",
    "FolderExistsError",
    "MissingDependencyError",
    # and
    "__version__",
]
