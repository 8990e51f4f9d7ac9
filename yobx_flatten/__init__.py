"""Define once how a class is flattened; export it, run it, store it.

``torch.export`` flattens what is registered: lists, dicts and little else. Inside this context manager it also
flattens the transformers caches, and one program serves all lengths::

    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))

``export_program`` and ``export_onnx`` do the same and replay the result against the eager model. The classes of results
and of errors are in the folders of these functions: ``yobx_flatten.errors``, ``yobx_flatten.diagnose`` and so on.
"""

from __future__ import annotations

from .lazy_names import lazy_names

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this file
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
    "WRONG_REGISTRATIONS",
    "flattening_list",
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
    # export with proof
    "export_program",
    "export_onnx",
    "ExportedModel",
    "ExportReport",
    "Case",
    "DecodeSizes",
    "decode_inputs",
    # a model as a folder that generation tools open, and what generates with it
    "export_folder",
    "verify_folder",
    "open_generator",
    "open_model",
    "OnnxForCausalLM",
    "OnnxGenerator",
    "ProgramGenerator",
    "Sampling",
    # store nested values, and replay them
    "save_nested",
    "load_nested",
    "MiniOnnxBuilder",
    "create_onnx_model_from_input_tensors",
    "create_input_tensors_from_onnx_model",
    "save_case",
    "load_case",
    "replay_case",
    # which sizes vary
    "dynamic_shapes",
    "check_dynamic_shapes",
    "make_dynamic_shapes_kv_cache",
    # transformers caches
    "make_dynamic_cache",
    "make_static_cache",
    "make_encoder_decoder_cache",
    # what a thing is made of
    "string_type",
    "leaves",
    # diagnose: what is wrong with an object, an example, an error, a recipe
    "find_unregistered",
    "explain",
    "check_inputs",
    "explain_error",
    "compare_specs",
    "check_recipe",
    # what can go wrong
    "FlattenError",
    # and
    "__version__",
]

# Where the names are documented, and others that were all here once: programs that import them from here keep running.
_HOMES = (
    "declare",
    "diagnose",
    "errors",
    "export",
    "generate",
    "huggingface",
    "model_folder",
    "record",
    "storage",
    "trees",
    "verify",
)

if TYPE_CHECKING:  # the same names for a type checker, and none that is misspelt
    # register classes, write a node as JAX does, and the Flattening List
    from .declare import (
        flattening_list,
        make_flattening_function_for_dataclass,
        mirror,
        pytree_dataclass,
        register,
        register_cache_flattening,
        register_class_flattening,
        register_flattening_functions,
        register_pytree_node,
        register_pytree_node_class,
        register_pytree_with_keys,
        register_pytree_with_keys_class,
        static_field,
        unregister_cache_flattening,
        unregister_class_flattening,
    )
    from .diagnose import check_inputs, check_recipe, compare_specs, explain, explain_error, find_unregistered
    from .errors import FlattenError
    from .export import Case, ExportedModel, ExportReport, export_onnx, export_program
    from .generate import OnnxGenerator, ProgramGenerator, Sampling
    from .huggingface import (
        WRONG_REGISTRATIONS,
        DecodeSizes,
        decode_inputs,
        make_dynamic_cache,
        make_encoder_decoder_cache,
        make_static_cache,
    )
    from .model_folder import (
        OnnxForCausalLM,
        export_folder,
        open_generator,
        open_model,
        verify_folder,
    )
    from .recipe.attributes import functions_from_fields
    from .record import RecordedCalls, record_calls
    from .storage import (
        MiniOnnxBuilder,
        create_input_tensors_from_onnx_model,
        create_onnx_model_from_input_tensors,
        load_case,
        load_nested,
        replay_case,
        save_case,
        save_nested,
    )
    from .trees import check_dynamic_shapes, dynamic_shapes, leaves, make_dynamic_shapes_kv_cache, string_type

    # isort: split
    from .declare import *  # noqa: F403
    from .diagnose import *  # noqa: F403
    from .errors import *  # noqa: F403
    from .export import *  # noqa: F403
    from .generate import *  # noqa: F403
    from .huggingface import *  # noqa: F403
    from .model_folder import *  # noqa: F403
    from .record import *  # noqa: F403
    from .storage import *  # noqa: F403
    from .trees import *  # noqa: F403
    from .verify import *  # noqa: F403
else:
    __getattr__, __dir__ = lazy_names(globals(), (*_HOMES, "recipe.attributes"))
