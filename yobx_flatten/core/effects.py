"""Find the side effects of a call, such as a tensor written in place or an item appended to a list, and undo them.

Before a call, a :class:`Snapshot` records the objects that the call can use, without copying them. Snapshots contain
items, attributes, closure variables and default arguments. Snapshots contain the classes and global variables of the
user's code, but not of installed libraries. Snapshots omit the state of optimizers, which is twice as large as the
model. No user code runs.
"""

# before = Snapshot.of(args=args, module=module, loss_fn=loss_fn)
# result = module(*args)
# before.changes()      {"args[0]": "written", "module.seen": "grown", "loss_fn.count": "replaced"}

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ..errors.failures import result_or
from . import contents
from .interrupts import Undoing

Effect: TypeAlias = Literal["written", "replaced", "grown", "set", "removed"]

_MANY_ITEMS = 10_000  # the items of a larger container, such as the rows of a data set, are not entered

_PLAIN_TYPES = frozenset((*contents.NUMBERS, torch.dtype, torch.device, torch.layout))


class Effects(dict[str, Effect]):
    """The changes that a call made to objects, by key path. The dict is empty if the call changed nothing.

    ``objects`` maps each key path to two objects: before and after the call. ``None`` stands for a missing object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, tuple[Any, Any]] = {}

    def note(self, path: str, effect: Effect, before: object, after: object) -> None:
        if path not in self:
            self[path] = effect
            self.objects[path] = before, after

    def __str__(self) -> str:
        return ", ".join(f"{path} ({effect})" for path, effect in self.items())


class Snapshot:
    """A record of objects before a call, to find and undo the changes that the call makes."""

    def __init__(self, holders: list[_Holder], contents: list[_Content]) -> None:
        self._holders, self._contents = holders, contents

    @classmethod
    def of(cls, **roots: object) -> Snapshot:
        """Take a snapshot of objects. The key paths in :meth:`changes` begin with the names of the arguments."""
        walk = _Walk()
        walk.enter(roots)
        return cls(walk.holders, walk.contents)

    @classmethod
    def of_attributes(cls, module: torch.nn.Module) -> Snapshot:
        """Copy the attributes of all submodules of a module, except parameters, buffers and code, into a snapshot."""
        walk = _AttributeWalk()
        for name, part in module.named_modules():
            walk._hold(name, vars(part), _OWN_ATTRIBUTES)
        walk.enter({})
        found = cls(walk.holders, walk.contents)
        found.keep_values(())
        return found

    def changes(self) -> Effects:
        found = Effects()
        for holder in self._holders:
            holder.compare(found)
        for content in self._contents:
            content.compare(found)
        return found

    def restore(self) -> None:
        for holder in self._holders:
            holder.restore()
        for content in self._contents:
            content.restore()

    def keep_values(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy all values that a call may write in place; skip ``nn.Parameter`` objects not in ``parameters``."""
        copied: dict[object, Any] = {}  # one copy of a storage that several tensors share
        written = {id(parameter) for parameter in parameters}
        for content in self._contents:
            if not isinstance(content.obj, torch.nn.Parameter) or id(content.obj) in written:
                content.keep(copied)


@contextlib.contextmanager
def undisturbed(
    *, seed: int | None = None, parameters: Iterable[torch.nn.Parameter] = (), **roots: object
) -> Iterator[Snapshot]:
    """Undo all changes that a ``with`` block makes to the given objects (``roots``), also after an exception.

    The random generators of torch, NumPy and Python are also restored. A result of the block that shares memory with a
    given object is overwritten after the block: copy the result inside the block.
    """
    # seed: seed of random numbers in the block; by default the generators continue
    # parameters: the parameters that the call writes; none by default. Other parameters are large and rarely written:
    # they are not copied, so a write to them stays.
    # yields: the snapshot from before the block
    before, shared = Snapshot.of(**roots), Snapshot.of(**shared_generators())
    before.keep_values(parameters)
    shared.keep_values(())
    undoing, undoing_shared = Undoing(before.restore), Undoing(shared.restore)
    with undoing_shared, undoing_shared, undoing, undoing:
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                if devices:
                    torch.cuda.manual_seed_all(seed)
                for generator in shared_generators().values():
                    generator.seed(seed)
            yield before


def shared_generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy.random")
    shared: dict[str, Any] = {"random": random.getstate} | ({} if numpy is None else {"numpy.random": numpy.get_state})
    return {name: read.__self__ for name, read in shared.items()}


class _Walk:
    most = 200_000  # the walk stops here: an object that holds a trainer reaches everything

    def __init__(self) -> None:
        self.holders: list[_Holder] = []
        self.contents: list[_Content] = []
        self._layouts = contents.Layouts()
        self._seen: set[int] = set()
        self._buffers: set[int] = set()
        self._readers: dict[type, contents.Reader | None] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()

    def enter(self, roots: Mapping[str, object]) -> None:
        self._waiting.extend(roots.items())
        while self._waiting:
            path, obj = self._waiting.popleft()
            if type(obj) in _PLAIN_TYPES or id(obj) in self._seen:
                continue
            if len(self._seen) >= self.most:
                break
            self._seen.add(id(obj))
            self._visit(path, obj)

    def _visit(self, path: str, obj: Any) -> None:
        kind = type(obj)
        if (way := _BUILT_IN.get(kind)) is not None:
            self._hold(path, obj, way)
        elif kind is types.FunctionType:
            for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
                self._waiting.append((f"{path}.{name}", cell))
            self._waiting += [(path, one) for one in (obj.__defaults__, obj.__kwdefaults__) if one]
            self._hold(path, obj.__dict__, _ATTRIBUTES)
            if _is_own_code(obj.__module__):
                names = [name for name in _global_names(obj.__code__) if name in obj.__globals__]
                self._hold("", obj.__globals__, _Globals(tuple(names)))
        elif kind is types.MethodType:
            self._waiting += [(path, obj.__func__), (path, obj.__self__)]
        elif issubclass(kind, type):
            if _is_own_code(obj.__module__):
                self._hold(obj.__qualname__, obj, _CLASS)
                functions = [getattr(one, "__func__", one) for one in vars(obj).values()]
                kinds = types.FunctionType, contents.REMEMBERING
                self._waiting += [(f.__qualname__, f) for f in functions if type(f) in kinds]
        else:
            if kind not in self._readers:
                self._readers[kind] = contents.reader_of(kind)
            reader = self._readers[kind]
            if reader is None:
                self._visit_object(path, obj, self._layouts(kind))
                return
            # batch norm writes its statistics without a new version
            if reader is contents.mark_of_tensor and (id(obj) in self._buffers or obj.is_inference()):
                reader = contents.mark_with_bits
            self.contents.append(content := _Content(path, obj, reader))
            self._waiting += [(f"{path}.grad", content.grad)]
            self._waiting += [(path, obj.__wrapped__)] if kind is contents.REMEMBERING else []

    def _visit_object(self, path: str, obj: Any, layout: contents.Layout) -> None:
        kind = type(obj)
        # the parts of a pipeline are not entered: a pipeline itself undoes the changes of its runs
        is_part = kind.__module__.startswith("roundpipe_runtime.") and not issubclass(kind, torch.nn.Module)
        if is_part or isinstance(obj, torch.optim.Optimizer) or layout.is_closed:
            return
        if layout.attributes is not None:
            held = layout.attributes(obj)
            if issubclass(kind, torch.nn.Module):
                # a parameter has the path `model.weight`, not `model._parameters['weight']`
                children = [held[name] for name in ("_parameters", "_buffers", "_modules") if name in held]
                self._seen.update(map(id, children))
                self._buffers.update(map(id, held.get("_buffers", {}).values()))
                for one in children:
                    self._hold(path, one, _CHILDREN)
            self._hold(path, held, _ATTRIBUTES)
        if layout.slots:
            self._hold(path, obj, _Slots(layout.slots))
        if layout.items is not None:
            way = next((way for base, way in _BUILT_IN.items() if issubclass(kind, base)), None)
            if way is not None:
                self._hold(path, obj, way)
            elif len(obj) <= _MANY_ITEMS:  # a tuple or a frozenset, which cannot change
                self._waiting += [(path + key, value) for key, value in layout.items(obj)]
        if _is_own_code(kind.__module__):
            self._waiting.append((kind.__qualname__, kind))

    def _hold(self, path: str, owner: Any, way: _Way) -> None:
        before = way.read(owner)
        self.holders.append(_Holder(path, owner, way, before))
        if before and len(before) <= _MANY_ITEMS:
            for key, value in before.items():
                if type(value) not in _PLAIN_TYPES:
                    self._waiting.append((path + way.spell(key), value))


class _AttributeWalk(_Walk):
    """Visits the attributes of modules, and the containers, tensors and user-defined objects in the attributes."""

    most = 10_000

    def _visit(self, path: str, obj: Any) -> None:
        kind = type(obj)
        is_library = kind.__module__.partition(".")[0] in _WITH_OWN_STATE
        if issubclass(kind, _NOT_ATTRIBUTES) or (is_library and not issubclass(kind, _VALUES)):
            return
        super()._visit(path, obj)


# Libraries restore their own state.
_WITH_OWN_STATE = frozenset({"torch", "transformers", "roundpipe_runtime", "yobx_flatten", *sys.stdlib_module_names})
_NOT_ATTRIBUTES = (torch.nn.Module, torch.nn.Parameter, type, types.FunctionType, types.MethodType)
_VALUES = (dict, list, set, tuple, collections.deque, torch.Tensor)


def _is_own_code(module: object) -> bool:
    return isinstance(module, str) and (module == "__main__" or _is_outside_of_libraries(module))


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = {"yobx_flatten", "roundpipe_runtime"}


@functools.lru_cache(maxsize=4096)
def _is_outside_of_libraries(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    if not isinstance(file, str) or top in _OURS or top in sys.stdlib_module_names:
        return False
    return not file.startswith(_LIBRARIES) and "site-packages" not in file and "dist-packages" not in file


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [_global_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *itertools.chain.from_iterable(inner)]))


class _Way:
    """Reads and restores the items of a dict, and formats the keys. Subclasses do the same for other containers."""

    def read(self, owner: Any) -> dict[Any, Any]:
        return dict.copy(owner)

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        dict.clear(owner)
        dict.update(owner, before)

    def spell(self, key: Any) -> str:
        return f"[{contents.format_key(key)}]"


class _Ordered(_Way):
    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(collections.OrderedDict.items(owner)) if owner else {}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        collections.OrderedDict.clear(owner)
        for key, value in before.items():
            collections.OrderedDict.__setitem__(owner, key, value)


class _Attributes(_Way):
    def spell(self, key: Any) -> str:
        return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{contents.format_key(key)}]"


class _OwnAttributes(_Attributes):
    """Reads and restores the attributes of a module that ``torch.nn.Module`` itself does not have."""

    def read(self, owner: Any) -> dict[Any, Any]:
        return {name: value for name, value in owner.items() if name not in _OF_TORCH}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        for name in self.read(owner).keys() - before.keys():
            del owner[name]
        owner.update(before)


class _Children(_Attributes):
    def spell(self, key: Any) -> str:
        return f"[{key}]" if isinstance(key, str) and key.isdigit() else super().spell(key)


class _Sequence(_Way):
    def read(self, owner: Any) -> dict[Any, Any]:
        return dict(enumerate((list if isinstance(owner, list) else collections.deque).__iter__(owner)))

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        kind: Any = list if isinstance(owner, list) else collections.deque  # not the methods of a subclass
        kind.clear(owner)
        kind.extend(owner, before.values())


class _Set(_Way):
    def read(self, owner: Any) -> dict[Any, Any]:
        return {id(item): item for item in set.__iter__(owner)}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        set.clear(owner)
        set.update(owner, before.values())

    def spell(self, key: Any) -> str:
        return "{...}"


class _Cell(_Way):
    """Reads and restores the value of a closure variable of a function; an unbound variable has no value."""

    def read(self, owner: Any) -> dict[Any, Any]:
        try:
            return {"": owner.cell_contents}
        except ValueError:
            return {}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        if before:
            owner.cell_contents = before[""]
        elif self.read(owner):
            del owner.cell_contents

    def spell(self, key: Any) -> str:
        return ""


class _Slots(_Attributes):
    def __init__(self, slots: Iterable[tuple[str, Callable[[Any], Any]]]) -> None:
        self._slots = tuple(slots)

    def read(self, owner: Any) -> dict[Any, Any]:
        found = {}
        for name, read in self._slots:
            with contextlib.suppress(AttributeError):  # never set
                found[name] = read(owner)
        return found

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        now = self.read(owner)
        for name, read in self._slots:
            descriptor: Any = read.__self__  # type: ignore[attr-defined] # of the slot
            with contextlib.suppress(AttributeError, TypeError):  # read only, like those of a partial
                if name in before and now.get(name, owner) is not before[name]:
                    descriptor.__set__(owner, before[name])
                elif name in now and name not in before:
                    descriptor.__delete__(owner)


class _Globals(_Way):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def read(self, owner: Any) -> dict[Any, Any]:
        found = {name: owner[name] for name in self._names if name in owner}
        return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        owner.update(before)

    def spell(self, key: Any) -> str:
        return str(key)


class _ClassAttributes(_Attributes):
    """Reads and restores the attributes of a class, except methods and descriptors."""

    def read(self, owner: Any) -> dict[Any, Any]:
        code = (types.FunctionType, type, staticmethod, classmethod)
        found = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        return {k: v for k, v in found.items() if not (issubclass(type(v), code) or hasattr(type(v), "__get__"))}

    def write(self, owner: Any, before: Mapping[Any, Any]) -> None:
        now = self.read(owner)
        for name in now.keys() - before.keys():
            type.__delattr__(owner, name)
        for name, value in before.items():
            if now.get(name, owner) is not value:
                type.__setattr__(owner, name, value)


_OF_TORCH = frozenset(vars(torch.nn.Module()))
_OWN_ATTRIBUTES, _ATTRIBUTES, _CHILDREN = _OwnAttributes(), _Attributes(), _Children()
_CLASS = _ClassAttributes()
_BUILT_IN: dict[type, _Way] = {
    collections.OrderedDict: _Ordered(),  # before the class that it is derived from
    dict: _Way(),
    list: _Sequence(),
    collections.deque: _Sequence(),
    set: _Set(),
    types.CellType: _Cell(),
}


class _Holder(NamedTuple):
    """An object, and the objects that it contained at the time of the snapshot."""

    path: str
    owner: Any
    way: _Way
    before: dict[Any, Any]

    def compare(self, found: Effects) -> None:
        after = self.way.read(self.owner)
        before = self.before
        if before.keys() == after.keys() and all(map(_is_same, before.values(), after.values())):
            return
        if isinstance(self.way, _Sequence) and len(before) != len(after):
            common = all(map(_is_same, before.values(), after.values()))
            effect: Effect = "removed" if len(after) < len(before) else "grown" if common else "replaced"
            found.note(self.path, effect, None, self.owner)
            return
        if isinstance(self.way, _Set):
            found.note(self.path, "grown" if before.keys() <= after.keys() else "removed", None, self.owner)
            return
        for key in {**before, **after}:
            path = self.path + self.way.spell(key)
            one, other = before.get(key), after.get(key)
            if key not in after:
                found.note(path, "removed", one, None)
            elif key not in before:
                found.note(path, "set", None, other)
            elif not _is_same(one, other):
                effect = "set" if one is None else "replaced"
                if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dim() == other.dim():
                    # a cache grows along one axis
                    differ = [(a, b) for a, b in zip(one.shape, other.shape, strict=True) if a != b]
                    effect = "grown" if len(differ) == 1 and differ[0][1] > differ[0][0] else effect
                found.note(path, effect, one, other)

    def restore(self) -> None:
        after = self.way.read(self.owner)
        same = len(after) == len(self.before) and all(
            _is_same(key, other) and value is now  # a key may be a tensor, as in the state of an optimizer
            for (key, value), (other, now) in zip(self.before.items(), after.items(), strict=True)
        )
        if not same:
            self.way.write(self.owner, self.before)


def _is_same(one: object, other: object) -> bool:
    """Return whether two objects are identical, or equal values of a built-in type."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _PLAIN_TYPES:
        return one == other or (one != one and other != other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return False


class _Content:
    """A tensor, an array or a random generator, whose values a call can write in place."""

    def __init__(self, path: str, obj: Any, read: contents.Reader) -> None:
        self.path, self.obj, self._read, self._before = path, obj, read, read(obj)
        is_leaf = isinstance(obj, torch.Tensor) and obj.requires_grad and obj.is_leaf
        self.grad = obj.grad if is_leaf else None
        self._restore: Callable[[], object] | None = None

    def compare(self, found: Effects) -> None:
        if self._read(self.obj) != self._before:
            found.note(self.path, "written", self.obj, self.obj)
        if isinstance(self.obj, torch.Tensor) and self.obj.requires_grad and self.obj.is_leaf:
            now = self.obj.grad
            if now is not self.grad:
                effect: Effect = "set" if self.grad is None else "removed" if now is None else "replaced"
                found.note(f"{self.path}.grad", effect, self.grad, now)

    def keep(self, copied: dict[object, Any]) -> None:
        self._restore = result_or(
            lambda: contents.restoring(self.obj, self._before, self.grad, copied),
            lambda error: None,  # a tensor of a trace has no memory
        )

    def restore(self) -> None:
        if self._restore is not None:
            self._restore()
