"""Choose the execution providers of onnxruntime that run a file, by the name of a device or as a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..errors import FlattenError, GenerationError, InvalidArgumentError, MissingDependencyError, describe_class

Providers: TypeAlias = Sequence[str | tuple[str, dict[str, Any]]]

CPU = "CPUExecutionProvider"

DEVICES = {
    "cpu": (CPU, "", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "device_id", "onnxruntime-gpu"),
    "tensorrt": ("TensorrtExecutionProvider", "device_id", "onnxruntime-gpu"),
    "migraphx": ("MIGraphXExecutionProvider", "device_id", "onnxruntime-migraphx"),
    "directml": ("DmlExecutionProvider", "device_id", "onnxruntime-directml"),
    "coreml": ("CoreMLExecutionProvider", "", "onnxruntime"),
    "webgpu": ("WebGpuExecutionProvider", "", "onnxruntime-webgpu"),
    "openvino": ("OpenVINOExecutionProvider", "device_type", "onnxruntime-openvino"),
    "xnnpack": ("XnnpackExecutionProvider", "", "onnxruntime"),
    "qnn": ("QNNExecutionProvider", "", "onnxruntime-qnn"),
}
"""By name: the provider, the option that the part after a colon sets, and the package that has the provider."""


def choose_providers(device: str | None, providers: Providers | None) -> list[str | tuple[str, dict[str, Any]]]:
    """Return the providers of a session, the CPU last: it runs what the others do not.

    >>> choose_providers(None, None)
    ['CPUExecutionProvider']
    """
    # device: a key of `DEVICES`, with an option after a colon: `"cuda:1"`, `"openvino:GPU"`; `None` for the CPU, or for
    # `providers`
    # providers: execution providers, as `onnxruntime.InferenceSession` takes them; `None` for those of `device`
    if device is not None and providers is not None:
        raise InvalidArgumentError(
            f"device={device!r} is a name for a list of providers. Pass device= or providers=, not both."
        )
    if providers is not None:
        chosen = list(providers)
        if isinstance(providers, str) or not chosen:
            raise InvalidArgumentError(f"providers must be a list of names, found {describe_class(providers)}.")
    else:
        chosen = [_provider_of("cpu" if device is None else device)]
    for one in chosen:
        _check_there(one if isinstance(one, str) else one[0])
    return chosen if CPU in map(_name, chosen) else [*chosen, CPU]


def is_on_cpu(providers: Providers) -> bool:
    """Return whether nothing but the CPU of onnxruntime computes."""
    return [_name(one) for one in providers] == [CPU]


def check_runs_on(session: Any, providers: Providers, file: str, failure: type[FlattenError] = GenerationError) -> None:
    """Refuse a session whose provider did not start: onnxruntime continues with the next one, and warns in its log."""
    lost = [_name(one) for one in providers if _name(one) not in session.get_providers()]
    if lost:
        raise failure(
            f"{', '.join(lost)} did not start for {file}, and onnxruntime would run it with "
            f"{', '.join(session.get_providers())}. Its log names the library or driver that is missing."
        )


def only_for_onnxruntime(runtime: str, device: str | None, providers: Providers | None) -> None:
    """Refuse a device for another runtime."""
    if runtime != "onnxruntime" and (device not in (None, "cpu") or providers is not None):
        raise InvalidArgumentError(
            f"device= and providers= are for onnxruntime, and these files run with {runtime} on the CPU. Export ONNX "
            "files, or leave them out."
        )


def _name(provider: str | tuple[str, dict[str, Any]]) -> str:
    return provider if isinstance(provider, str) else provider[0]


def _provider_of(device: str) -> str | tuple[str, dict[str, Any]]:
    kind, colon, part = device.partition(":")
    if kind not in DEVICES:
        raise InvalidArgumentError(f"There is no device {device!r}. There are {', '.join(DEVICES)}.")
    provider, option, _ = DEVICES[kind]
    if not colon:
        return provider
    if not option or not part:
        raise InvalidArgumentError(f"There is no {device!r}: {kind} has no numbered devices. Pass {kind!r}.")
    return provider, {option: part}


def _check_there(provider: str) -> None:
    import onnxruntime

    there = onnxruntime.get_available_providers()
    if provider in there:
        return
    package = next((package for name, _, package in DEVICES.values() if name == provider), None)
    remedy = ""
    if package not in (None, "onnxruntime"):
        remedy = f" Install the build that has it, instead of onnxruntime:\n    pip install {package}"
    raise MissingDependencyError(f"The installed onnxruntime has no {provider}; it has {', '.join(there)}.{remedy}")
