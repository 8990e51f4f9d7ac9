"""Register how a class is flattened, then export, run and store models that use the class.

``torch.export`` flattens registered classes only: lists, dicts and few others. Inside the context manager
``register_flattening_functions``, transformers caches are also flattened. This program accepts caches of any length::

    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))

``export_program`` and ``export_onnx`` register caches, export a model, and compare the result with the eager model.
Classes of results and of errors are in subpackages, such as ``yobx_flatten.errors`` and ``yobx_flatten.diagnose``.
"""

from __future__ import annotations

from .core.lazy_names import lazy_names

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this file
__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 # grouped by task, not by the alphabet
    # register classes, and the block to export in
    "register_class_flattening", "unregister_class_flattening", "make_flattening_function_for_dataclass",
    "functions_from_fields", "register_cache_flattening", "unregister_cache_flattening",
    "register_flattening_functions", "WRONG_REGISTRATIONS", "flattening_list",
    # write a node the way JAX does
    "register", "register_pytree_node", "register_pytree_node_class", "register_pytree_with_keys",
    "register_pytree_with_keys_class", "pytree_dataclass", "static_field",
    # classes that another library knows
    "mirror",
    # record the calls of a running model
    "record_calls", "RecordedCalls",
    # export with proof
    "export_program", "export_onnx", "ExportedModel", "ExportReport", "Case", "DecodeSizes", "decode_inputs",
    # a model as a folder that generation tools open, and what generates with it
    "export_folder", "verify_folder", "open_generator", "open_model", "OnnxForCausalLM", "OnnxGenerator",
    "ProgramGenerator", "Sampling",
    # store nested values, and replay them
    "save_nested", "load_nested", "MiniOnnxBuilder", "create_onnx_model_from_input_tensors",
    "create_input_tensors_from_onnx_model", "save_case", "load_case", "replay_case",
    # which sizes vary
    "dynamic_shapes", "check_dynamic_shapes", "make_dynamic_shapes_kv_cache",
    # transformers caches
    "make_dynamic_cache", "make_static_cache", "make_encoder_decoder_cache",
    # what a thing is made of
    "string_type", "leaves",
    # diagnose: what is wrong with an object, an example, an error, a recipe
    "find_unregistered", "explain", "check_inputs", "explain_error", "compare_specs", "check_recipe",
    # what can go wrong
    "FlattenError",
    # and
    "__version__",
]  # fmt: skip

# The modules of the public names. Names outside of `__all__` are also found: earlier versions had them here.
_HOMES = (
    "declare", "diagnose", "errors", "export", "export.record", "generate", "huggingface", "model_folder", "storage",
    "trees", "verify",
)  # fmt: skip

if TYPE_CHECKING:  # the same names for a type checker
    from .declare import *
    from .diagnose import *
    from .errors import *
    from .export import *
    from .export.record import *
    from .generate import *
    from .huggingface import *
    from .model_folder import *
    from .registry.recipe.attributes import functions_from_fields
    from .storage import *
    from .trees import *
    from .verify import *
else:
    __getattr__, __dir__ = lazy_names(globals(), (*_HOMES, "registry.recipe.attributes"))
