"""Change a file at random: its JSON, wherever that is, its tensors, or its bytes."""

import contextlib
import copy
import json
import pathlib
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

import onnx

SECRET = "secret.txt"  # a file next to the folder of a case, which no case has a reason to open

_STRANGER = "tests.fuzz.stranger:x"
_HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**40, 2**63, 10**30, -(10**30), 0.5, 1e308, -1e308),
    *("", "x", "..", "/", f"../{SECRET}", "/dev/zero", "/etc/passwd", "a\0b", "\ud800", "float32", "load", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, [0] * 2000),
    *(_STRANGER, "os:system", "builtins:eval", "subprocess:Popen", "numpy.f2py.__main__:x"),
    {"!class": _STRANGER},
    {"!class": "logging:FileHandler"},
    {"!function": "os:system"},
    {"!enum": [_STRANGER, "a"]},
    {"!flag": ["os:system", "true"]},
    {"!namedtuple": ["subprocess:Popen", [["true"]]]},
    {"!dataclass": ["subprocess:Popen", {"args": ["true"]}]},
    {"!dataclass": ["torch.export.graph_signature:InputSpec", {"__class__": {"!class": "urllib.request:URLopener"}}]},
    {"!config": [_STRANGER, "{}"]},
    {"!tuple": [{"!class": _STRANGER}]},
    {"leaf": "static", "value": {"!class": _STRANGER}},
    {"leaf": "tensor", "dtype": "float32", "shape": [2**40, 2**40]},
    {"node": _STRANGER, "static": None, "children": []},
    {"$tensor": "nothing"},
    {"$dtype": "load"},
    f"layer_0={_STRANGER}=[]",
    "layer_0=transformers.cache_utils:DynamicLayer=[[\"same\", \"__import__('os').system('true')\"]]",
]

_DEEP = re.compile(r'"deep (\d+)"')  # stands for so many brackets, which no function here could go through


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found, waiting = [], [tree]
    while waiting:
        one = waiting.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, value in items:
            found.append((one, key))
            waiting.append(value)
    return found


def _change_document(tree: Any, dice: random.Random) -> Any:
    """The document with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            return dice.choice(_HOSTILE)
        container, key = dice.choice(places)
        kind, old = dice.randrange(9), container[key]
        if kind <= 2:
            container[key] = copy.deepcopy(dice.choice(_HOSTILE))
        elif kind == 3:
            del container[key]
        elif kind == 4:
            other, name = dice.choice(places)
            container[key] = copy.deepcopy(other[name])
        elif kind == 5 and isinstance(container, dict):
            container[dice.choice([name for _, name in places if isinstance(name, str)] or ["x"])] = old
        elif kind == 6:
            container[key] = f"deep {dice.choice((3, 100, 3000, 100_000))}"
        elif isinstance(old, (int, float)) and not isinstance(old, bool):
            container[key] = old + dice.choice((1, -1, 2**16, -(2**16))) if dice.random() < 0.7 else old * 1000
        elif isinstance(old, str):
            container[key] = _change_text(old, dice)
        elif isinstance(old, list):
            more = copy.deepcopy(old[: dice.randrange(len(old) + 1)])
            container[key] = [*old, *more] if dice.random() < 0.5 else old[:-1]
        else:
            container[key] = [old]
    return tree


def _change_text(text: str, dice: random.Random) -> str:
    """A text with another character, or, of one that is JSON itself, another document."""
    if text[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return _dumped(_change_document(json.loads(text), dice))
    place = dice.randrange(len(text) + 1)
    return text[:place] + dice.choice(("", ".", "/", ":", "=", "0", "__", "\0", "é", "'", "]")) + text[place + 1 :]


def _dumped(tree: Any) -> str:
    return _DEEP.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), json.dumps(tree))


def _change_bytes(data: bytes, dice: random.Random) -> bytes:
    if not data:
        return bytes(dice.randrange(256) for _ in range(dice.randrange(20)))
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice((1, 2, 8, 100, 1000)))
    kind = dice.randrange(5)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[end:]
    if kind == 2:
        return data[:end] + data[start:]
    filled = bytes(dice.randrange(256) for _ in range(end - start)) if kind == 3 else b"\xff" * (end - start)
    return data[:start] + filled + data[end:]


def _json(data: bytes, dice: random.Random) -> bytes:
    return _dumped(_change_document(json.loads(data), dice)).encode("utf-8", "surrogatepass")


def _lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines()
    place = dice.randrange(len(lines))
    lines[place] = _json(lines[place], dice)
    return b"\n".join(lines)


def _safetensors(data: bytes, dice: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + size], dice)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _onnx(data: bytes, dice: random.Random) -> bytes:
    """The structure among the metadata, with its checksum, or an initializer."""
    model = onnx.ModelProto.FromString(data)
    texts = {entry.key: entry for entry in model.metadata_props}
    structure = next((entry for key, entry in texts.items() if key.endswith(".structure")), None)
    if structure is not None and dice.random() < 0.8:
        text = _dumped(_change_document(json.loads(structure.value), dice))
        structure.value = text.encode("utf-8", "replace").decode("utf-8")
        texts[f"{structure.key}_crc32"].value = str(zlib.crc32(structure.value.encode()))
    elif model.graph.initializer:
        tensor = dice.choice(model.graph.initializer)
        kind = dice.randrange(4)
        if kind == 0:
            tensor.dims.append(dice.choice((0, 1, 2**40, -1)))
        elif kind == 1:
            tensor.data_type = dice.randrange(-1, 30)
        elif kind == 2:
            tensor.raw_data = _change_bytes(tensor.raw_data, dice)
        else:
            tensor.external_data.add(key="location", value=dice.choice((f"../{SECRET}", "/dev/zero", "x")))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
    return bytes(model.SerializeToString())


_FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".safetensors": _safetensors,
    ".onnx": _onnx,
}


def change_file(path: pathlib.Path, dice: random.Random) -> None:
    data, form, changed = path.read_bytes(), _FORMS.get(path.suffix), None
    if form is not None and dice.random() < 0.8:
        with contextlib.suppress(ValueError, IndexError, TypeError):  # what is derived is not what it says: bytes, then
            changed = form(data, dice)
    path.write_bytes(_change_bytes(data, dice) if changed is None else changed)
