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

from ..errors import InvalidArgumentError, describe_class
from ..errors.failures import first_line, result_or, undone_on_failure
from ..huggingface.cache_names import tokens_in
from ..recipe.aliases import PyTree
from ..registry.patches import LOCK, AttributePatch
from ..trees.walk import key_name, node_of
from .call import Call, Callee, Snapshot, callee_of, libraries_in_use, prepare_folder, write_call
from .calls import RecordedCalls, cache_of, kind_of


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
    the ``with`` block, classes are also registered, as :func:`~yobx_flatten.register_flattening_functions` does. The
    end of the ``with`` block restores the original method, also after an exception. ``record_calls`` blocks can be
    nested, and calls can come from any thread; calls in a torch trace are not recorded. A call that raises an error is
    stored with its inputs in :attr:`RecordedCalls.failed`, and the error is raised unchanged.

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
    folder = None if to is None else prepare_folder(to)
    calls = RecordedCalls(callee)
    recorder = _Recorder(callee, calls, limit, outputs, None if device is None else torch.device(device), folder)
    with libraries_in_use(), _recording(callee.owner, callee.method, recorder):
        yield calls


@dataclasses.dataclass
class _Begun:
    """A recorded call of a model that has not returned yet, with a copy of its inputs."""

    index: int
    inputs: Snapshot
    cache: Any
    past: int | None
    kind: str


class _Recorder:
    def __init__(
        self,
        callee: Callee,
        calls: RecordedCalls,
        limit: int | None,
        outputs: bool,
        device: torch.device | None,
        folder: pathlib.Path | None,
    ) -> None:
        self.callee, self.calls, self.limit = callee, calls, limit
        self.outputs, self.device, self.folder = outputs, device, folder
        self.next_index = self.taken = 0

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Begun | None:
        """Copy the inputs of a call before it runs; return ``None`` for a call that is not recorded."""
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
            return _Begun(index, inputs, cache, past, kind_of(cache, past))

    def dropped(self) -> None:
        with LOCK:
            self.taken -= 1

    def failed(self, begun: _Begun, error: BaseException) -> None:
        self.dropped()
        with LOCK:
            is_kept = self.limit is None or len(self.calls.failed) < self.limit
        if not is_kept or not isinstance(error, Exception):
            return
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        call = Call(self.callee, begun.index, begun.kind, begun.past, None, {"inputs": begun.inputs}, text)

        def not_stored(other: Exception) -> Call:  # the error of the call takes precedence
            error.add_note(f"record_calls could not store this call ({type(other).__name__}: {first_line(other)}).")
            return call

        found = result_or(functools.partial(self.stored, call), not_stored)
        with LOCK:
            self.calls.failed.append(found)

    def after(self, begun: _Begun, result: PyTree) -> None:
        with undone_on_failure(self.dropped):
            call = self.record_of(begun, result)
        with LOCK:
            self.calls._add(call)

    def record_of(self, begun: _Begun, result: PyTree) -> Call:
        # transformers fills the cache of a call; a call without a cache can make one
        made = begun.cache
        if made is None:
            node = node_of(result)
            named = {} if node is None else dict(zip(map(key_name, node.keys), node.children, strict=True))
            made = cache_of(named)
        seen = None if made is None else tokens_in(made)
        past, kind = begun.past, begun.kind
        if begun.cache is None and made is not None:
            past, kind = (None if seen is None else 0), "prefill"
        new = None if seen is None or past is None else seen - past
        parts = {"inputs": begun.inputs}
        if self.outputs:
            parts["outputs"] = Snapshot.take(result, name="outputs", device=self.device)
        return self.stored(Call(self.callee, begun.index, kind, past, new, parts))

    def stored(self, call: Call) -> Call:
        """Return the recorded call; with a folder, write it to a file, and return a ``Call`` that reads the file."""
        return call if self.folder is None else write_call(self.folder, call)


class _Interception:
    """Replace a method of an object while at least one ``record_calls`` block records its calls."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.recorders: tuple[_Recorder, ...] = ()
        self.patch = AttributePatch(owner, name, self._replacement(getattr(owner, name)))

    def _replacement(self, original: Callable[..., Any]) -> Any:
        if not inspect.ismethod(original):  # a function that another library put on the object, as accelerate does

            @functools.wraps(original)
            def watched_function(*args: Any, **kwargs: Any) -> Any:
                return self._call(original, args, kwargs)

            return watched_function
        function = original.__func__

        @functools.wraps(function)
        def watched(owner: object, *args: Any, **kwargs: Any) -> Any:
            if owner is not self.owner:  # a deep copy of the object, made while it was watched
                return function(owner, *args, **kwargs)
            return self._call(original, args, kwargs)

        # a method, so that a deep copy of the object calls its own
        return types.MethodType(watched, self.owner)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # calls inside a trace have placeholders and are not recorded
        if torch.compiler.is_compiling() or not self.recorders:
            return original(*args, **kwargs)
        with contextlib.ExitStack() as failed:
            begun_calls = []
            for recorder in self.recorders:
                begun = recorder.before(args, kwargs)
                if begun is not None:
                    begun_calls.append((recorder, begun))
                    failed.push(functools.partial(_pass_on, recorder, begun))
            result = original(*args, **kwargs)
            failed.pop_all()
        for recorder, begun in begun_calls:
            recorder.after(begun, result)
        return result


def _pass_on(recorder: _Recorder, begun: _Begun, kind: object, error: BaseException | None, trace: object) -> None:
    assert error is not None
    recorder.failed(begun, error)


_IN_FORCE: dict[tuple[int, str], _Interception] = {}


@contextlib.contextmanager
def _recording(owner: object, name: str, recorder: _Recorder) -> Iterator[None]:
    """In a ``with`` block, pass every call of the method ``owner.name`` to a recorder; such blocks may overlap."""
    key = (id(owner), name)
    with LOCK:
        found = _IN_FORCE.get(key)
        if found is None:
            try:
                found = _Interception(owner, name)
                found.patch.acquire()
            except (TypeError, AttributeError) as error:
                raise InvalidArgumentError(
                    f"record_calls: {name} of {describe_class(type(owner))} cannot be replaced ({error}). Record a "
                    f"module that {name} calls:\n    record_calls(module)"
                ) from error
            _IN_FORCE[key] = found
        found.recorders = (*found.recorders, recorder)
    try:
        yield
    finally:
        with LOCK:
            found.recorders = tuple(other for other in found.recorders if other is not recorder)
            if not found.recorders:
                found.patch.release()
                del _IN_FORCE[key]
