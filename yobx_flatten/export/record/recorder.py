"""Record calls inside a block: ``with record_calls(model) as calls: model.generate(...)``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...errors import InvalidArgumentError, RecordError, describe_class, require
from ...errors.failures import first_line, result_or, undone_on_failure
from ...huggingface.cache_names import has_read, tokens_in
from ...registry.patches import LOCK, AttributePatch
from ...registry.recipe.aliases import PyTree
from ...trees.walk import key_name, node_of
from .call import Call, Callee, Snapshot, call_files, callee_of, libraries_in_use, write_call
from .calls import RecordedCalls, cache_of


@contextlib.contextmanager
def record_calls(
    target: object,
    *,
    method: str | None = None,
    limit: int | None = None,
    outputs: bool = True,
    device: torch.device | str | None = "cpu",
    to: str | os.PathLike[str] | None = None,
) -> Iterator[RecordedCalls]:
    """Context manager that records copies of the inputs and outputs of all calls of a module or a method.

    Inputs are copied before a call, because the call may fill the KV cache; outputs are copied after the call. Inside
    the ``with`` block, KV caches and outputs of the Hugging Face libraries that are already imported are registered, as
    in a :func:`~yobx_flatten.register_flattening_functions` block. The end of the ``with`` block restores the original
    method, also after an exception. ``record_calls`` blocks can be nested. Calls can come from any thread. Calls in a
    torch trace are not recorded. A call that raises an error is stored with its inputs in :attr:`RecordedCalls.failed`,
    and the error is raised unchanged.

    Args:
        target: a module (its ``forward`` is recorded), an object with a ``method``, or a bound method.
        method: the name of the method to record; ``forward`` by default.
        limit: largest number of calls to record; ``None``, the default, records all calls.
        outputs: whether to record the outputs; ``True`` by default.
        device: the device of the copies, ``"cpu"`` by default; ``None`` for the device of each tensor. A :class:`Call`
            returns its tensors on their original device.
        to: a folder that gets one file per call, so that no copies stay in memory; :meth:`RecordedCalls.load` reads
            the folder.

    Yields:
        The recorded calls; the list is complete at the end of the block.

    Raises:
        InvalidArgumentError: when ``target`` has no method to record, or ``limit`` is not positive.
        RecordError: when the folder ``to`` already contains recorded calls.
        NotRegisteredError: raised by a call whose inputs or outputs contain tensors in an object of a class that is
            not registered.

    >>> linear = torch.nn.Linear(3, 2)
    >>> with record_calls(linear) as calls:
    ...     _ = linear(torch.zeros(4, 3)), linear(torch.zeros(5, 3))
    >>> calls[1], calls[1].inputs["input"].shape, calls.axes().names
    (<call 1 of Linear.forward, forward>, torch.Size([5, 3]), {('input', 0): 'batch'})
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidArgumentError(f"record_calls: limit must be a number of 1 or more, found {describe_class(limit)}.")
    callee = callee_of(target, method)
    folder = None
    if to is not None:
        require("safetensors", purpose="record_calls(..., to=...)")
        folder = pathlib.Path(to)
        if folder.is_file():
            raise RecordError(
                f"{folder} is a file, but calls are written to a folder:\n    record_calls(model, to=FOLDER)"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if call_files(folder):
            raise RecordError(
                f"{folder} holds recorded calls already. Name another folder:\n    record_calls(model, to=...)"
            )
    calls = RecordedCalls(callee)
    recorder = _Recorder(callee, calls, limit, outputs, None if device is None else torch.device(device), folder)
    key = (id(callee.owner), callee.method)
    with libraries_in_use():
        with LOCK:
            found = _IN_FORCE.get(key)
            if found is None:
                try:
                    found = _Interception(callee.owner, callee.method)
                    found.patch.acquire()
                except (TypeError, AttributeError) as error:
                    raise InvalidArgumentError(
                        f"record_calls: {callee.method} of {describe_class(type(callee.owner))} cannot be recorded "
                        f"({error}). Record a module that {callee.method} calls:\n    record_calls(module)"
                    ) from error
                _IN_FORCE[key] = found
            found.recorders = (*found.recorders, recorder)
        try:
            yield calls
        finally:
            with LOCK:
                found.recorders = tuple(other for other in found.recorders if other is not recorder)
                if not found.recorders:
                    found.patch.release()
                    del _IN_FORCE[key]


@dataclasses.dataclass(eq=False)
class _Recorder:
    callee: Callee
    calls: RecordedCalls
    limit: int | None
    outputs: bool
    device: torch.device | None
    folder: pathlib.Path | None  # gets a file for each call
    next_index: int = 0
    taken: int = 0

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Any] | None:
        """Return a :class:`Call` with copied inputs, and the call's KV cache; ``None`` if the call is not recorded."""
        named = self.callee.bind(args, kwargs)
        if named is None:
            return None
        with LOCK:
            if self.limit is not None and self.taken >= self.limit:
                return None
            index, self.next_index, self.taken = self.next_index, self.next_index + 1, self.taken + 1
        with undone_on_failure(self.dropped):
            inputs = Snapshot.take(named, name="inputs", device=self.device)
            cache = cache_of(named)
            past = None if cache is None else tokens_in(cache)
            kind = "forward" if cache is None else "decode" if past or has_read(cache) else "prefill"
            return Call(self.callee, index, kind, past, None, {"inputs": inputs}), cache

    def dropped(self) -> None:
        with LOCK:
            self.taken -= 1

    def failed(self, call: Call, error: BaseException) -> None:
        self.dropped()
        with LOCK:
            is_kept = self.limit is None or len(self.calls.failed) < self.limit
        if not is_kept or not isinstance(error, Exception):
            return
        call.error = f"{type(error).__name__}: {error}".rstrip(": ")

        def not_stored(other: Exception) -> Call:  # the error of the call takes precedence
            error.add_note(f"record_calls could not store this call ({type(other).__name__}: {first_line(other)}).")
            return call

        found = result_or(functools.partial(self.stored, call), not_stored)
        with LOCK:
            self.calls.failed.append(found)

    def after(self, call: Call, cache: Any, result: PyTree) -> None:
        with undone_on_failure(self.dropped):
            # transformers fills the cache of a call; a call without a cache can make one
            node = node_of(result) if cache is None else None
            made = cache
            if node is not None:
                made = cache_of(dict(zip(map(key_name, node.keys), node.children, strict=True)))
            seen = None if made is None else tokens_in(made)
            if cache is None and made is not None:
                call.past, call.kind = (None if seen is None else 0), "prefill"
            call.new = None if seen is None or call.past is None else seen - call.past
            if self.outputs:
                call.parts["outputs"] = Snapshot.take(result, name="outputs", device=self.device)
            call = self.stored(call)
        with LOCK:
            self.calls._add(call)

    def stored(self, call: Call) -> Call:
        return call if self.folder is None else write_call(self.folder, call)


class _Interception:
    """Replace a method of an object while at least one ``record_calls`` block records its calls."""

    def __init__(self, owner: object, name: str) -> None:
        self.recorders: tuple[_Recorder, ...] = ()
        original = getattr(owner, name)
        is_method = inspect.ismethod(original)  # else a function that another library put on the object (accelerate)
        function = original.__func__ if is_method else original

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_method and args[0] is not owner:  # a deep copy of the object, made while it was watched
                return function(*args, **kwargs)
            return self._call(original, args[1:] if is_method else args, kwargs)

        # a method, so that a deep copy of the object calls its own
        self.patch = AttributePatch(owner, name, types.MethodType(watched, owner) if is_method else watched)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # calls inside a trace have placeholders and are not recorded
        if torch.compiler.is_compiling() or not self.recorders:
            return original(*args, **kwargs)
        with contextlib.ExitStack() as failed:
            begun_calls = []
            for recorder in self.recorders:
                begun = recorder.before(args, kwargs)
                if begun is not None:
                    begun_calls.append((recorder, *begun))
                    failed.push(lambda _, error, trace, to=recorder, call=begun[0]: to.failed(call, error))
            result = original(*args, **kwargs)
            failed.pop_all()
        for recorder, call, cache in begun_calls:
            recorder.after(call, cache, result)
        return result


_IN_FORCE: dict[tuple[int, str], _Interception] = {}  # by the id of the owner and the name of the method
