"""Record calls inside a block: ``with record_calls(model) as calls: model.generate(...)``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError, describe_class
from ..errors.failures import result_or, undone_on_failure
from ..errors.messages import first_line
from ..huggingface.cache_names import tokens_in
from ..recipe.aliases import PyTree
from ..registry.locking import LOCK
from ..trees.node import key_name, node_of
from .call import Call, about_call
from .callee import Callee, callee_of
from .calls import RecordedCalls
from .files import prepare_folder, write_call
from .interception import watching
from .phases import cache_of, kind_of
from .snapshot import Snapshot, libraries_in_use


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
    """Context manager that records the calls of a module, or of a method: copies of the inputs and the outputs.

    Inputs are copied before the call, since it can fill the cache that it is given; outputs after it.
    :func:`~yobx_flatten.register_flattening_functions` is open inside, for the libraries that are imported. Afterwards
    the object is as it was found, also after an exception. Recordings can be nested, and calls can come from any
    thread; calls that a trace makes are not recorded. A call that raises is kept in :attr:`RecordedCalls.failed`, with
    its inputs and its error, which comes out unchanged.

    Args:
        target: a module (its ``forward`` is recorded), an object with a ``method``, or a bound method.
        method: the name of the method to record; ``forward`` by default.
        limit: number of calls to record, after which calls pass unrecorded; ``None`` for all.
        outputs: whether to keep the outputs; ``True`` by default.
        device: the device for the copies, ``"cpu"`` by default; ``None`` leaves them where the tensors are. A call
            returns its tensors on their original device.
        to: a folder to write the calls to, one file each; memory then holds no tensors. They are read again with
            :meth:`RecordedCalls.load`.

    Yields:
        The calls so far, complete when the block is left.

    Raises:
        InvalidArgumentError: when there is nothing to record.
        RecordError: when the folder holds calls already.
        NotRegisteredError: from a call that takes or returns tensors inside an object of a class that is not
            registered.

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
    with libraries_in_use(), watching(callee.owner, callee.method, recorder):
        yield calls


@dataclasses.dataclass
class _Begun:
    """A call that has not returned yet."""

    index: int
    inputs: Snapshot
    cache: Any
    past: int | None
    kind: str


class _Recorder:
    """Makes a record of each call it is shown."""

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
            return _Begun(index, inputs, cache, past, kind_of(cache, past, False))

    def dropped(self) -> None:
        with LOCK:
            self.taken -= 1

    def failed(self, token: _Begun, error: BaseException) -> None:
        self.dropped()
        with LOCK:
            is_kept = self.limit is None or len(self.calls.failed) < self.limit
        if not is_kept or not isinstance(error, Exception):
            return
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        parts = {"inputs": token.inputs}
        call = Call(self.callee, token.index, token.kind, token.past, None, parts, text)

        def stored() -> Call:
            if self.folder is None:
                return call
            kept = write_call(self.folder, token.index, parts, about_call(call))
            return Call(self.callee, token.index, token.kind, token.past, None, kept, text)

        def not_stored(other: Exception) -> Call:  # the error of the call is the one that comes out
            error.add_note(f"record_calls could not store this call ({type(other).__name__}: {first_line(other)}).")
            return call

        found = result_or(stored, not_stored)
        with LOCK:
            self.calls.failed.append(found)

    def after(self, token: _Begun, result: PyTree) -> None:
        with undone_on_failure(self.dropped):
            call = self.record_of(token, result)
        with LOCK:
            self.calls._add(call)

    def record_of(self, begun: _Begun, result: PyTree) -> Call:
        # transformers fills the cache that it is given; a call without one can make one
        made = begun.cache if begun.cache is not None else cache_of(_top_level(result))
        seen = None if made is None else tokens_in(made)
        past, kind = begun.past, begun.kind
        if begun.cache is None:
            past, kind = (None if seen is None else 0), kind_of(None, None, made is not None)
        new = None if seen is None or past is None else seen - past
        parts = {"inputs": begun.inputs}
        if self.outputs:
            parts["outputs"] = Snapshot.take(result, name="outputs", device=self.device)
        call = Call(self.callee, begun.index, kind, past, new, parts)
        if self.folder is None:
            return call
        stored = write_call(self.folder, begun.index, parts, about_call(call))
        return Call(self.callee, begun.index, kind, past, new, stored)


def _top_level(result: PyTree) -> dict[str, Any]:
    node = node_of(result)
    if node is None:
        return {}
    return {key_name(key): child for key, child in zip(node.keys, node.children, strict=True)}
