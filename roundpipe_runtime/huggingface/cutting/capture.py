"""Collect outputs that transformers captures by hooks in layers: router logits, attentions, hidden states.

During a model's forward, a context variable refers to a dictionary of lists, and the hooks append outputs to the lists.
In a pipeline, layers run later and in other threads, so the hooks get a separate dictionary for each layer call.
"""

# phase       the model's dictionary        completed calls extend it, recorded calls append a placeholder
# layer       a dictionary for each call    hooks append to it; its lists pass to later phases like other outputs

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import nn

from yobx_flatten.registry.recipe.aliases import PyTree

_MODULE = "transformers.utils.output_capturing"
_SELECTION = "_hidden_states_layers"


def _collector() -> Any:
    """Return the context variable with the dictionary to which hooks add outputs; ``None`` without transformers."""
    if (module := sys.modules.get(_MODULE)) is None:
        return COLLECTOR if is_old() else None
    return module._active_collector


def _collected() -> dict[str, Any]:
    collector = _collector()
    return (collector.get() if collector is not None else None) or {}


def collected_so_far() -> tuple[tuple[str, int], ...]:
    """Return the numbers of outputs that hooks have captured in the running forward, by name such as ``attentions``."""
    return tuple((name, len(found)) for name, found in _collected().items() if name != _SELECTION)


def collect_recorded(stand_in: Any) -> None:
    """Append a placeholder to the captured outputs of the running forward, for a layer that is recorded but not run."""
    # so that lists are as long as after the layer; computing with a placeholder stops the model's forward
    for name, found in _collected().items():
        if name != _SELECTION:  # the first layer adds two hidden states: its input and its output
            found.extend([stand_in] * (2 if name == "hidden_states" and not found else 1))


def extend_collected(captured: Mapping[str, list[Any]]) -> None:
    """Add the outputs that hooks captured in a layer call to the captured outputs of the model's forward."""
    held = _collected()
    for name, found in captured.items():
        if name not in held:
            continue
        for value in found:
            # a caller can select hidden states by number; the list keeps its length, with `None` for the others
            wanted = name != "hidden_states" or held.get(_SELECTION) is None or len(held[name]) in held[_SELECTION]
            held[name].append(value if wanted else None)


@contextlib.contextmanager
def collecting(wanted: tuple[tuple[str, int], ...]) -> Iterator[dict[str, list[Any]]]:
    """Context manager that yields lists by output name, to which the hooks of a layer append captured outputs."""
    collector = _collector()
    if not wanted or collector is None:
        yield {}
        return
    found: dict[str, list[Any]] = {name: [] for name, _ in wanted}
    later = dict(wanted).get("hidden_states", 0) > 0
    if later:
        # hooks put the input of their layer into an empty list, which is right for the first layer only
        found["hidden_states"].append(None)
    token = collector.set(found)
    try:
        yield found
    finally:
        collector.reset(token)
        if later:
            del found["hidden_states"][0]


def install_hooks(model: nn.Module) -> None:
    """Install transformers' hooks, which capture outputs of layers, on a model before its first forward."""
    # transformers itself would install hooks in the first forward, but that runs a copy of the model without layers
    if (module := sys.modules.get(_MODULE)) is None:
        for part in _decorated(model) if is_old() else ():
            for key, recorders in _recorders(part).items():
                for recorder, (name, inner) in itertools.product(recorders, list(part.named_modules())):
                    is_of_kind = recorder.target_class is not None and isinstance(inner, recorder.target_class)
                    is_named = recorder.class_name is not None and name.endswith(recorder.class_name)
                    is_meant = (is_of_kind or is_named) and (recorder.layer_name or "") in name
                    if is_meant and key not in inner.__dict__.setdefault(_HOOKED, set()):
                        inner.__dict__[_HOOKED].add(key)
                        inner.register_forward_hook(functools.partial(_append, key, recorder.index))
        return
    base = sys.modules["transformers"].PreTrainedModel
    done = "_output_capturing_hooks_installed"

    # A call installs hooks on all modules of a model. If a part has hooks already, it would get them twice, so the call
    # is made for the other parts only.
    def descend(part: nn.Module) -> None:
        models = [inner for inner in part.modules() if isinstance(inner, base)]
        if isinstance(part, base) and not any(getattr(inner, done, False) for inner in models):
            module.maybe_install_capturing_hooks(part)
            return
        if not getattr(part, done, False):
            for child in part.children():
                descend(child)

    descend(model)


def asked_for(model: nn.Module, kwargs: Mapping[str, Any]) -> Literal["none", "extras", "all"]:
    """Return which layer outputs a model returns: ``"all"``, ``"extras"`` (all except hidden states) or ``"none"``."""

    def asked(name: str) -> bool:
        given = kwargs.get(name)
        return bool(getattr(getattr(model, "config", None), name, False) if given is None else given)

    if asked("output_hidden_states"):
        return "all"
    return "extras" if asked("output_attentions") or asked("output_router_logits") else "none"


# The collector for versions of transformers without one, such as 4.56 and 5.0.
COLLECTOR: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("roundpipe_outputs", default=None)
_HOOKED = "_rp_hooked_outputs"


def is_old() -> bool:
    """Report whether transformers lacks the context variable for captured attentions, as versions 4.56 and 5.0 do."""
    generic = sys.modules.get("transformers.utils.generic")
    return _MODULE not in sys.modules and hasattr(generic, "_CAN_RECORD_REGISTRY")


def collect_on_copy(copied: nn.Module) -> None:
    """Make modules of a copied model collect outputs of layers, as transformers' ``check_model_inputs`` does."""
    if is_old():
        for part in _decorated(copied):
            part.__dict__["forward"] = functools.partial(_forward, part)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain = type(module).forward
    recorders, wanted = _recorders(module), []
    for key in recorders:
        name = "output_attentions" if key == "cross_attentions" else f"output_{key}"
        attentions = kwargs.get("output_attentions", getattr(module.config, "output_attentions", False))
        if kwargs.get(name, getattr(module.config, name, attentions)):
            wanted.append(key)
    if not wanted:
        return plain(module, *args, **kwargs)
    returns_dict = kwargs.pop("return_dict", None)
    returns_dict = getattr(module.config, "return_dict", True) if returns_dict is None else returns_dict
    collected: dict[str, list[Any]] = {key: [] for key in wanted}
    token = COLLECTOR.set(collected)
    try:
        none = {f"output_{key}": False for key in wanted}
        outputs = plain(module, *args, **{**kwargs, **none}, return_dict=True)
    finally:
        COLLECTOR.reset(token)
    wrapper = _wrapper(plain)
    assert wrapper is not None
    # since 5.0, an argument of the decorator states whether the last hidden state is the output
    is_tied = inspect.getclosurevars(wrapper).nonlocals.get("tie_last_hidden_states", True)
    for key, found in collected.items():
        if not found:
            continue
        if key == "hidden_states" and is_tied:
            found[-1] = getattr(outputs, "vision_hidden_states", getattr(outputs, "last_hidden_state", found[-1]))
        if key == "attentions" and len(recorders[key]) == 2:
            outputs[key], outputs[f"cross_{key}"] = tuple(found[0::2]), tuple(found[1::2])
        else:
            outputs[key] = tuple(found)
    return outputs if returns_dict else outputs.to_tuple()


def _append(key: str, index: int, module: nn.Module, args: tuple[Any, ...], output: PyTree) -> None:
    held = COLLECTOR.get()
    if held is None or key not in held:
        return
    if key == "hidden_states" and not held[key]:
        held[key].append(args[0])
    value = output[index] if isinstance(output, tuple) else output
    if value is not None:
        held[key].append(value)


def _decorated(model: nn.Module) -> list[nn.Module]:
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return [part for part in model.modules() if isinstance(part, base) and _wrapper(type(part).forward) is not None]


def _wrapper(function: Any) -> Callable[..., Any] | None:
    # the wrapper that the decorator `check_model_inputs` of transformers made, also below other decorators
    while function is not None:
        if getattr(function, "__code__", None) and function.__code__.co_qualname.startswith("check_model_inputs."):
            return function  # type: ignore[no-any-return] # a function has a code
        function = getattr(function, "__wrapped__", None)
    return None


def _recorders(module: nn.Module) -> dict[str, list[Any]]:
    generic = sys.modules["transformers.utils.generic"]
    found: Mapping[str, Any] = generic._CAN_RECORD_REGISTRY.get(str(type(module))) or {}
    made: dict[str, list[Any]] = {}
    for key, given in found.items():
        made[key] = []
        for one in given if isinstance(given, list) else [given]:
            is_name, index = isinstance(one, str), 0 if "hidden_states" in key else 1
            if not isinstance(one, generic.OutputRecorder):
                kind, name = (None, one) if is_name else (one, None)
                one = generic.OutputRecorder(target_class=kind, class_name=name, index=index)
            made[key].append(one)
    return made
