"""What a stranger writes into a program is refused before torch evaluates, imports or loads any of it."""

import json
import os
import pathlib
import pickle
import sys
import zipfile

import pytest
import torch

from yobx_flatten.errors import DamagedFileError, NotRegisteredError, UntrustedFileError
from yobx_flatten.runners.program_runner import ProgramRunner, open_program
from yobx_flatten.runners.strangers.stated_expressions import is_guard, is_size

MODEL = "models/model.json"
RUNS = "__import__('os').mkdir('marker')"


class Halved(torch.nn.Module):
    """Conditions on sizes, a condition on values, a branch, and a text among the inputs."""

    def forward(self, x, rows, mode):
        half = x.reshape(2, -1).sum(0)
        found = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
        count = (x > 0).sum().item()
        torch._check(count < 1000)
        scaled = torch.nn.functional.interpolate(x[None, None], scale_factor=1.5)
        return half, found, torch.zeros(count), scaled, rows["a b"] * min(x.shape[0], 5), len(mode)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program whose document has text in all places that torch reads as code."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    x, rows = torch.rand(8, 6), {"a b": torch.rand(3)}
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 1: auto}, "rows": {"a b": {0: auto}}, "mode": None}
    torch.export.save(torch.export.export(Halved(), (x,), {"rows": rows, "mode": "it"}, dynamic_shapes=shapes), path)
    return path


@pytest.fixture(autouse=True)
def _no_code_runs(tmp_path, monkeypatch):
    """Whatever a test opens, no folder appears, and a module next to the file is not imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text("import os\nos.mkdir('marker')\nx = list\n")
    yield
    assert not (tmp_path / "marker").exists()
    assert "stranger" not in sys.modules


def entries_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(entries, *, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile("changed.pt2", "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(f"changed/{name}", content)
    return pathlib.Path("changed.pt2")


def places(tree):
    """Every container of a document, with its keys."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, value in items:
            yield one, key
            waiting.append(value)


def with_text(path, key, text, skip=lambda old: False):
    """The program with one text replaced: the first one that stands under a key."""
    entries = entries_of(path)
    document = json.loads(entries[MODEL])
    container, name = next(
        (one, name)
        for one, name in places(document)
        if name == key and isinstance(one[name], (str, list)) and not skip(one[name])
    )
    container[name] = [text] if isinstance(container[name], list) else text
    entries[MODEL] = json.dumps(document).encode()
    return written(entries)


def test_what_torch_writes_is_opened(program):
    """With everything that the others replace: sizes, conditions, branches, texts, keys."""
    document = json.loads(entries_of(program)[MODEL])
    assert document["guards_code"]
    found = {name for _, name in places(document)}
    assert {"expr_str", "as_string", "in_spec", "forward_arg_names", "as_graph"} <= found
    x, rows = torch.rand(6, 6), {"a b": torch.rand(3)}
    outputs = open_program(program).module()(x, rows=rows, mode="it")
    expected = Halved()(x, rows, "it")
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


TEXTS = {
    "a size": ("expr_str", f"{RUNS} or Integer(3)"),
    "a size with an escape": ("expr_str", "Symbol('s77\\x27 + x')"),
    "a condition": ("guards_code", f"{RUNS} is None"),
    "an argument": ("forward_arg_names", f"x={RUNS}"),
    "the name of an input": ("name", f"x={RUNS}"),
    "the name of a value": ("as_name", f"x={RUNS}"),
    "an operator of Python": ("target", "torch.os.mkdir"),
    "an operator on files": ("target", "torch.ops.aten.from_file.default"),
    "an operator that calls": ("target", "_operator.call"),
    "machine code as an operator": ("target", "torch.ops.higher_order.aoti_call_delegate"),
    "a function by its name": ("target", "torch.export.custom_ops._call_custom_autograd_function_in_pre_dispatch"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_torch_runs_is_refused(program, case):
    key, text = TEXTS[case]
    path = with_text(program, key, text, skip=lambda old: old == "")
    with pytest.raises(UntrustedFileError, match=r"(.|\n)*trust=True"):
        ProgramRunner(open_program(path))


def test_a_text_among_the_inputs_stays_one(program):
    """It stands between quotes in a condition that is compiled."""
    path = with_text(program, "as_string", f"' or {RUNS} or '", skip=lambda old: old != "it")
    with pytest.raises(UntrustedFileError, match="the text"):
        ProgramRunner(open_program(path))


def test_a_key_of_an_input_stays_one(program):
    """It stands between quotes in the source of the module."""
    spec = next(one[name] for one, name in places(json.loads(entries_of(program)[MODEL])) if name == "in_spec")
    path = with_text(program, "in_spec", spec.replace("mode", f"mode': {RUNS}, 'x"))
    with pytest.raises(UntrustedFileError, match="the key"):
        ProgramRunner(open_program(path))


ENUM = {"__enum__": True, "fqn": "stranger:x", "name": "a"}
FACTORY = {"default_factory_module": "stranger", "default_factory_name": "x", "dict_context": []}
SPECS = {
    "an enum": ({"type": "builtins.tuple", "context": json.dumps([ENUM]), "children_spec": []}, NotRegisteredError),
    "a factory": (
        {"type": "collections.defaultdict", "context": FACTORY, "children_spec": []},
        UntrustedFileError,
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_spec_imports_no_module(program, case):
    spec, error = SPECS[case]
    with pytest.raises(error):
        open_program(with_text(program, "out_spec", json.dumps([1, spec])))


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("name", ["opaque_obj_0", "custom_obj_0", "custom_obj_0/x", "tensor_0/../opaque_obj_0"])
def test_an_object_among_the_constants_is_refused(program, name):
    """torch unpickles what has such a name, without its restricted unpickler."""
    entries = entries_of(program)
    config = next(entry for entry in entries if entry.endswith("constants_config.json"))
    stated = json.loads(entries[config])
    stated["config"]["x"] = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    entries |= {config: json.dumps(stated).encode(), f"data/constants/{name}": pickle.dumps(Payload())}
    with pytest.raises(UntrustedFileError):
        open_program(written(entries))


@pytest.mark.parametrize("name", ["data/aotinductor/model/a.wrapper.so", "serialized_exported_program.json", "x.py"])
def test_entries_that_are_no_part_of_a_program_are_refused(program, name):
    """torch loads machine code that stands next to a program, and what older versions wrote."""
    with pytest.raises(UntrustedFileError, match="does not belong to a program"):
        open_program(written(entries_of(program) | {name: b"{}"}))


def test_an_archive_takes_no_more_memory_than_its_bytes(program):
    path = written(entries_of(program) | {"extra/zeros": bytes(10**8)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**6
    with pytest.raises(DamagedFileError, match="compressed"):
        open_program(path)


def test_a_counter_is_raised_to_no_number_of_a_file(program):
    """torch counts up to the number of a symbol, one by one."""
    entries = entries_of(program)
    document = json.loads(entries[MODEL])
    document["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 1}
    with pytest.raises(UntrustedFileError, match="the symbol 'u99999999999'"):
        open_program(written(entries | {MODEL: json.dumps(document).encode()}))


def test_whoever_is_trusted_may_write_anything(program):
    """As in ``torch.export.load``."""
    path = written(entries_of(program) | {"notes.txt": b"ours"})
    with pytest.raises(UntrustedFileError):
        open_program(path)
    assert open_program(path, trust=True).graph_signature.user_inputs
    # the commands, too
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from yobx_flatten.cli.app import app

    refused, drawn = (CliRunner().invoke(app, ["explain", str(path), *option]) for option in ([], ["--trust"]))
    assert isinstance(refused.exception, UntrustedFileError)
    assert drawn.exit_code == 0, drawn.output
    assert drawn.output.startswith("inputs\n")


@pytest.mark.parametrize(
    "text",
    [
        "Integer(10)**Integer(10)",
        "Pow(Pow(Pow(Integer(9), Integer(9)), Integer(9)), Integer(9))",
        "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
        "LShift(Integer(1), Integer(10000000000))",
        "Symbol(open('x'))",
        "Symbol('s7', **{})",
        "Add(*[1])",
        "factorial(100000)",
        "(lambda: 1)()",
        "s7.__class__",
        "s7 # \n",
        "x\nx",
        "-" * 5000 + "1",
        "Integer('1e999999999')",
    ],
)
def test_no_size(text):
    assert not is_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('u0', integer=True)",
        "Add(Mul(Integer(-2), Symbol('s7', positive=True, integer=True)), Rational(1, 2))",
        "Mul(Float('1.5', precision=53), ToFloat(Symbol('s27', positive=True, integer=True)))",
        "Pow(Symbol('s77', positive=True, integer=True), Integer(2))",
        "And(GreaterThan(Symbol('u0', integer=True), Integer(0)), Not(Equality(Symbol('s0'), Integer(1))))",
        "s7 + 2*s0 // 3",
        "u0 >= 0",
    ],
)
def test_a_size(text):
    assert is_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].__class__",
        "L['x'].data_ptr()",
        "L['x\"'].size()[0] == 1",
        "L['x'].size()[0] == 9**9**9",
        "torch.load('x')",
        "math.factorial(100)",
        "x.size()",
        "[a for a in L]",
        "L['x'].size()[0] == 1, 2",
    ],
)
def test_no_guard(text):
    assert not is_guard(text)


def test_a_guard():
    assert is_guard("((L['x'].size()[1]*L['past key'][0].size()[0]) % 2) == 0 and not L['y'] is None")
    assert is_guard("torch.sym_max(1, L['x'].stride()[0]) != math.ceil(L['n'] / 2)")
    assert is_guard("cast_symbool_to_symint_guardless(L['b']) >= -1")
