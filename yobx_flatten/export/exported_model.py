"""An exported program that can be called, saved, and converted to the files of runtimes such as OpenVINO."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from ..core.files.document import file_for_torch
from ..core.files.scratch import publish_files, scratch_for
from ..core.private_names.of_torch import pytree
from ..declare.scopes import options_in_use, register_flattening_functions
from ..diagnose.opaque import CONVERSIONS, explain_leaf
from ..errors import InvalidArgumentError, MissingDependencyError, SpecMismatchError, describe_class
from ..errors.failures import raised_as, result_or
from ..runners.program_runner import ProgramRunner
from ..trees.arguments import inputs_by_name
from ..trees.describe import string_type
from .example import Example
from .proof.report import ExportReport
from .quantization import Quantization, WeightBits
from .runtimes.executorch import Backend
from .runtimes.write import CacheForm, FileOptions, write_for
from .source import Source


def _about_kinds(example: Example | None, given: Mapping[str, Any]) -> InvalidArgumentError | None:
    """Return an error about an argument that is missing, unknown or of the wrong type; ``None`` if all are right."""
    held = {} if example is None else example.inputs
    for name in {**held, **given} if held else ():
        if name not in given or name not in held:
            what = "is missing" if name in held else "is not an input of the program"
            return InvalidArgumentError(f"{name} {what}. Pass the arguments of the export: {', '.join(held)}.")
        if _kinds(given[name]) != _kinds(held[name]):
            wanted = string_type(held[name], with_shape=True)
            found = f"expected {wanted} as in the example, found {describe_class(given[name])}"
            # torch.tensor cannot convert a ragged list, a text or None
            made = result_or(functools.partial(torch.tensor, given[name]), lambda error: None)
            is_tensor = isinstance(held[name], torch.Tensor) and made is not None
            return InvalidArgumentError(f"{name}: {found}." + f" Convert it:\n    torch.tensor({name})" * is_tensor)
    return None


def _kinds(value: Any) -> tuple[object, list[type]]:
    leaves, spec = pytree.tree_flatten(value)
    return spec, [torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]


@dataclasses.dataclass
class ExportedModel:
    """An exported program with its report; the program can be called outside ``register_flattening_functions``.

    Attributes:
        program: the ``torch.export.ExportedProgram``.
        report: times and sizes of the export, and the results of all comparisons with the module.
        path: the ONNX file; ``None`` if no ONNX file was written.

    >>> from yobx_flatten import export_program
    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> exported(torch.ones(7, 3)).shape
    torch.Size([7, 2])
    >>> exported.report.input_names, exported.path
    (['input'], None)
    """

    program: ExportedProgram
    report: ExportReport
    path: pathlib.Path | None = None
    _patches: dict[str, bool] = dataclasses.field(default_factory=dict, repr=False)
    _source: Source | None = dataclasses.field(default=None, init=False, repr=False)

    @functools.cached_property
    def _runner(self) -> ProgramRunner:
        return ProgramRunner(self.program, options=self._patches)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program with the same arguments as the module that was exported.

        Args:
            *args: positional arguments.
            **kwargs: keyword arguments.

        Returns:
            The same outputs as the module. The program changes its arguments, such as a KV cache, as the module does.
        """
        source, example = self._source, None if self._source is None else self._source.example
        about = self.program if example is None else example.module
        given = functools.partial(inputs_by_name, about, args, kwargs)

        def explained(error: Exception) -> Exception | None:
            classes = {type(leaf) for leaf in pytree.tree_leaves(given())}
            arrays = [str(cls) for cls in classes if cls.__module__.partition(".")[0] in CONVERSIONS]
            about_arrays = explain_leaf(given(), "".join(arrays))
            own = isinstance(error, SpecMismatchError)  # it names the constant that differs
            return about_arrays or (None if own else _about_kinds(example, given()))

        with raised_as(explained):
            found = self._runner.call(args, kwargs)
        if source is None or source.traced.left is None:
            return found
        return source.traced.left.given_back(found, source.example.of_call(args, kwargs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Store the program with ``torch.export.save``.

        Register your own classes, and load the file with ``torch.export.load`` inside
        ``register_flattening_functions``.

        Args:
            path: the file to write, usually with the suffix ``.pt2``; an incomplete file never has this name.
        """
        target = pathlib.Path(path)
        with register_flattening_functions(**self._patches), scratch_for(target) as folder:
            with file_for_torch(folder / target.name) as file:
                torch.export.save(self.program, file)
            publish_files(folder, target)

    def to_transformers(self) -> Any:
        """Return the program as an object of ``transformers.exporters``, which can call, save and load programs.

        Use the object inside ``register_flattening_functions``, so that this package flattens its caches. Outside of
        ``register_flattening_functions``, transformers permanently registers its own flattening functions for caches.

        Returns:
            A ``transformers.exporters.ExportedModel`` with this program as its only component, ``"model"``, and the
            model's configuration.

        Raises:
            InvalidArgumentError: when the program was not made by this package, or takes positional arguments.
            MissingDependencyError: when the installed transformers is older than 5.23.
        """
        example = source_of(self).example
        if example.args:
            raise InvalidArgumentError(
                "to_transformers: transformers' exporters call a program by keyword, but this program takes positional "
                'arguments. Export again with kwargs:\n    export_program(module, (), {"input_ids": input_ids})'
            )
        try:
            from transformers.exporters import base, metadata
            from transformers.exporters.configs import ExportFormat
        except ImportError as error:
            raise MissingDependencyError(
                "to_transformers needs the exporters of transformers 5.23 or later, which the installed transformers "
                "lacks:\n    pip install 'transformers>=5.23'"
            ) from error
        with register_flattening_functions(**options_in_use()):
            facts = metadata.build_export_metadata(example.module, example.kwargs, self.program, ["torch"])
        component, config = base.ExportedComponent(self.program, facts), getattr(example.module, "config", None)
        return base.ExportedModel({"model": component}, ExportFormat.DYNAMO, config=config)

    def to_onnx(
        self,
        path: str | os.PathLike[str],
        *,
        opset_version: int | None = None,
        quantize: WeightBits | Quantization | None = None,
        optimize: Literal["onnxruntime"] | None = None,
        translations: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> ExportReport:
        """Write the program as an ONNX file, and check the file in onnxruntime on the test inputs of this export.

        Args:
            path: the file to write, with the suffix ``.onnx``. The file is created only if its outputs are right.
            opset_version: see :func:`export_onnx`.
            quantize: see :func:`export_onnx`; ``None``, the default, does not quantize weights.
            optimize: see :func:`export_onnx`; ``None``, the default, uses standard ONNX operators.
            translations: see :func:`export_onnx`; none by default.

        Returns:
            The report of the comparison with the module: one result per test case.

        Raises:
            InvalidArgumentError: when an argument is invalid.
            MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a test case fails, or outputs differ by more than the export tolerance; no file is left.
        """
        options = {"opset_version": opset_version, "quantize": quantize, "optimize": optimize}
        return self._write("onnxruntime", path, "to_onnx", translations=translations, **options)

    def to_aotinductor(self, path: str | os.PathLike[str], *, cache: CacheForm = "in_place") -> ExportReport:
        """Compile the program with AOTInductor for this machine, and check the package on this export's test inputs.

        The package contains machine code, which runs when the package is loaded: load only packages that you trust.

        Args:
            path: the file to write, with the suffix ``.pt2``. The file is created only if its outputs are right.
            cache: with ``cache="returned"``, the package takes and returns keys and values. With ``cache="in_place"``,
                the default, the package writes keys and values into buffers. If ``cache="in_place"`` fails or gives
                wrong outputs, ``cache="returned"`` is used.

        Returns:
            The report of the comparison with the module: one result per test case.

        Raises:
            InvalidArgumentError: when ``path`` does not end with ``.pt2``, or a Python number is a dynamic input.
            MissingDependencyError: when there is no C++ compiler.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a test case fails, or outputs differ by more than the export tolerance; no file is left.
        """
        return self._write("aotinductor", path, "to_aotinductor", cache=cache)

    def to_executorch(
        self,
        path: str | os.PathLike[str],
        *,
        backend: Backend = "auto",
        quantize: WeightBits | Quantization | None = None,
        cache: CacheForm = "in_place",
    ) -> ExportReport:
        """Lower the program to an ExecuTorch file, and check the file on the test inputs of this export.

        ExecuTorch plans memory for the largest sizes, so every dynamic size needs an upper bound: ``bounds=`` of the
        export, or a ``Dim`` with ``max=`` in ``dynamic_shapes``.

        Args:
            path: the file to write, with the suffix ``.pte``. The file is created only if its outputs are right.
            backend: ``"xnnpack"`` for XNNPACK's kernels for all operators that XNNPACK has; ``"portable"`` for
                ExecuTorch's slower kernels. ``"auto"``, the default, tries ``"xnnpack"``, and uses ``"portable"`` if
                ``"xnnpack"`` fails or gives wrong outputs. XNNPACK approximates GELU, which causes an error of 1e-3 in
                a small Gemma 3 model.
            quantize: ``"int8"`` or ``"int4"`` to store the weights of linear layers in 8 or 4 bits with torchao. Only
                XNNPACK has kernels for quantized weights; these kernels round activations to 8 bits. The quantization
                error is measured as by :func:`export_onnx`. ``quantize=None``, the default, keeps float weights.
            cache: with ``cache="returned"``, the file takes and returns keys and values of a batch. With
                ``cache="in_place"``, the default, the file has batch size 1, and writes keys and values into buffers
                of its caller. If ``cache="in_place"`` fails or gives wrong outputs, ``cache="returned"`` is used.

        Returns:
            The report of the comparison with the module, and the memory that ExecuTorch plans for activations.

        Raises:
            InvalidArgumentError: when an argument is invalid, or a Python number is a dynamic input.
            DynamicShapesError: when a dynamic size has no upper bound.
            MissingDependencyError: when ExecuTorch is not installed, or does not fit the installed torch.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a test case fails, or outputs differ by more than the export tolerance; no file is left.
        """
        return self._write("executorch", path, "to_executorch", quantize=quantize, backend=backend, cache=cache)

    def to_openvino(
        self,
        path: str | os.PathLike[str],
        *,
        quantize: WeightBits | Quantization | None = None,
        cache: CacheForm = "in_place",
    ) -> ExportReport:
        """Write the program as OpenVINO files, and check the files in float32 on the test inputs of this export.

        By default, OpenVINO computes in bfloat16 on processors that support bfloat16. To compute in float32, compile
        the file with ``{"INFERENCE_PRECISION_HINT": "f32"}``.

        Args:
            path: the file to write, with the suffix ``.xml``; the weights get the suffix ``.bin``. The two files are
                created only if their outputs are right.
            quantize: ``"int8"`` or ``"int4"`` to store the weights in 8 or 4 bits with NNCF. The quantization error is
                measured as by :func:`export_onnx`. ``quantize=None``, the default, keeps float weights.
            cache: with ``cache="returned"``, keys and values are inputs and outputs. With ``cache="in_place"``, the
                default, keys and values are OpenVINO state variables. If OpenVINO would copy state variables in each
                call, or if outputs are wrong, ``cache="returned"`` is used.

        Returns:
            The report of the comparison with the module: one result per test case.

        Raises:
            InvalidArgumentError: when an argument is invalid, or a Python number is a dynamic input.
            MissingDependencyError: when openvino, onnx, onnxscript or (for ``quantize``) NNCF is not installed.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a test case fails, or outputs differ by more than the export tolerance; no file is left.
        """
        return self._write("openvino", path, "to_openvino", quantize=quantize, cache=cache)

    def _write(self, runtime: str, path: str | os.PathLike[str], caller: str, **options: Any) -> ExportReport:
        return write_for(source_of(self), FileOptions(runtime, pathlib.Path(path), caller, **options))

    def __str__(self) -> str:
        return str(self.report)


def source_of(exported: ExportedModel) -> Source:
    if exported._source is None:
        raise InvalidArgumentError(
            "This program was not made by export_program, so it has no test inputs with which to check a file. Export "
            "the module:\n    export_program(module, args, kwargs)\nor check a program of torch.export first:\n"
            "    prove_program(program, module)"
        )
    return exported._source
