"""Read leaves from the outputs of a run in onnxruntime or ``onnx.reference``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DamagedFileError, InvalidArgumentError, StoredFileError, describe_class
from ..files.damage import damage_as
from ..runners.elements import ELEMENTS, Element, pack
from ..runners.onnx_session import open_session

if TYPE_CHECKING:
    import onnx

_ENGINES = ("onnx", "onnxruntime", "ReferenceEvaluator")


class RunOutputs:
    """The outputs of a model without inputs; a :class:`.values.Source`."""

    # path: the file it is from; `None` for a model in memory
    # engine: `"onnxruntime"` or `"ReferenceEvaluator"`
    # sep: what stands between the name of a dict and `keys` or `values`, see `builder.MiniOnnxBuilder`

    def __init__(self, model: onnx.ModelProto, path: str | os.PathLike[str] | None, engine: str, sep: str) -> None:
        # onnx-diagnostic calls its own evaluator, which runs what the reference of ONNX runs, the second
        if engine not in (*_ENGINES, "ExtendedReferenceEvaluator"):
            raise InvalidArgumentError(
                f"create_input_tensors_from_onnx_model: engine is one of {', '.join(map(repr, _ENGINES))}, found "
                f"{describe_class(engine)}."
            )
        if engine == "onnxruntime":
            given = model.SerializeToString() if path is None else path
            session: Any = open_session(given, caller="engine='onnxruntime'", failure=StoredFileError)
            names = [output.name for output in session.get_outputs()]
        else:
            from onnx.reference import ReferenceEvaluator

            with damage_as(DamagedFileError, "The model" if path is None else os.fspath(path)):
                session = ReferenceEvaluator(model if path is None else os.fspath(path))
            names = session.output_names
        with damage_as(DamagedFileError, "The model" if path is None else os.fspath(path)):
            outputs = dict(zip(names, session.run(None, {}), strict=True))
        self._outputs = dict(outputs)
        for name, values in outputs.items():  # the leaves of a sequence are `name.0`, those of a dict `name.key`
            if isinstance(values, list):
                base = name.removesuffix(f"{sep}values")
                keys = outputs.get(f"{base}{sep}keys", range(len(values)))
                self._outputs.update({f"{base}.{key}": value for key, value in zip(keys, values, strict=True)})

    def check(self, record: dict[str, Any], element: Element, dims: tuple[int, ...], nbytes: int) -> None:
        """Refuse an output of another shape."""
        found = self._outputs.get(record["name"])
        if found is None or found.shape != dims:
            raise DamagedFileError(f"The model returns no {record['name']!r} of shape {dims}.")

    def fill(self, record: dict[str, Any], element: Element, view: memoryview) -> None:
        """Put the bytes of an output into memory; what the graph cast to float32 is cast back."""
        import numpy

        array = numpy.ascontiguousarray(self._outputs[record["name"]])
        if element.cast:
            name = next(name for name, known in ELEMENTS.items() if known == element)
            if element.packed > 1:
                import ml_dtypes  # comes with onnx

                codes = array.astype(getattr(ml_dtypes, name)).reshape(-1).view(numpy.uint8)
                array = pack(codes, element.packed)
            else:
                array = torch.tensor(array).to(getattr(torch, name)).reshape(-1).view(torch.uint8).numpy()
        view[:] = array.reshape(-1).view(numpy.uint8).data

    def strings(self, record: dict[str, Any]) -> list[bytes]:
        """Return the elements of an output that holds strings."""
        return [text.encode() for text in self._outputs[record["name"]].reshape(-1).tolist()]
