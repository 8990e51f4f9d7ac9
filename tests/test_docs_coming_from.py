"""Each row of "Coming from another library" is run: what it states to type does what the other library's does."""

import enum
import inspect
import pathlib
import re

import onnxruntime
import torch
from torch.utils import _pytree as pytree

import roundpipe_runtime.schedule
import yobx_flatten
from yobx_flatten import dynamic_shapes, export_onnx, export_program, record_calls, register_flattening_functions
from yobx_flatten.__main__ import main
from yobx_flatten.huggingface import DecodeSizes, decode_inputs, make_dynamic_cache
from yobx_flatten.model_folder.source import configuration
from yobx_flatten.model_folder.source.configuration import small_model

PAGE = pathlib.Path(__file__).parents[1] / "docs/guide/coming_from.md"


def _rows():
    found = {}
    others, _, _ = PAGE.read_text(encoding="utf-8").partition("## RoundPipe")  # tests/runtime/test_roundpipe_names.py
    for line in [*others.splitlines(), *(PAGE.parent / "from_optimum.md").read_text(encoding="utf-8").splitlines()]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and "`" in cells[0]:
            found[cells[0]] = cells[1].removesuffix("|").strip()
    return found


ROWS = _rows()


def _row_of(words):
    (row,) = [here for there, here in ROWS.items() if words in there]
    return row


def test_every_name_of_the_right_column_is_there():
    homes = (yobx_flatten, roundpipe_runtime, roundpipe_runtime.schedule, configuration)
    codes = [code for here in ROWS.values() for code in re.findall(r"`([^`]+)`", re.sub(r"\]\([^)]*\)", "", here))]
    called = [name for code in codes for name in re.findall(r"(?<![\w.])([A-Za-z_]\w*)\(", code)]
    assert len(set(called)) >= 13
    assert not [name for name in called if not any(hasattr(home, name) for home in homes)]
    for library in ("onnx", "openvino", "executorch"):  # for each exporter of transformers
        assert callable(getattr(yobx_flatten.ExportedModel, f"to_{library}"))
    assert "num_microbatch" in inspect.signature(roundpipe_runtime.RoundPipeRunConfig).parameters
    assert "label" in inspect.signature(roundpipe_runtime.RoundPipe.forward_backward).parameters


def test_yobx_names_that_are_kept_do_what_they_did_and_a_value_of_the_enum_registers_as_true_does():
    """`patch_transformers=TransformersPatchEnum.ALL`."""
    layers = [(torch.rand(2, 2, 3, 4), torch.rand(2, 2, 3, 4)) for _ in range(2)]
    cache, kind = make_dynamic_cache(layers), enum.IntFlag("TransformersPatchEnum", {"NONE": 0, "ALL": 3})
    assert yobx_flatten.string_type(torch.zeros(2, 3), with_shape=True) == "T1s2x3"
    flat, _ = yobx_flatten.flatten_dynamic_cache(cache)
    assert all(a is b for a, b in zip(flat, [one for layer in layers for one in layer], strict=True))
    assert all(hasattr(yobx_flatten, name) for name in ("register_class_flattening", "register_flattening_functions"))
    assert "a value of the enum also works" in _row_of("TransformersPatchEnum")
    with register_flattening_functions(patch_transformers=kind.ALL):
        assert len(pytree.tree_leaves(cache)) == 2 * len(layers)
        assert "DynamicCache" in str(yobx_flatten.flattening_list())


def test_yobx_an_observed_run_gives_shapes_arguments_and_a_comparison_and_a_cache_is_whole_without_a_line():
    """`InputObserver`; `finalize_cache`, `apply_patches_for_model`, `CacheKeyValue`: the model itself, in the block."""
    for name in ("calls.dynamic_shapes()", "calls.example()", "calls.replay(program)"):
        assert name in _row_of("InputObserver")
    model = small_model("llama")
    with record_calls(model) as calls:
        model.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=4, do_sample=False)
    decode = calls["decode"]
    how = {"dynamic_shapes": decode.dynamic_shapes(), "cases": []}
    assert decode.replay(export_program(decode.module(), kwargs=decode.example(), **how)).ok
    assert 'small_model("llama")' in _row_of("get_untrained_model_with_inputs")
    inputs = decode_inputs(model, DecodeSizes(2, 5, 3))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        cache = yobx_flatten.huggingface.cache_names.cache_of(model(**inputs))
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        flat = pytree.tree_leaves(cache)
    assert [tuple(one.shape) for one in keys] == [(2, 2, 8, 16)] * 2
    in_order = [one for pair in zip(keys, values, strict=True) for one in pair]
    assert all(a is b for a, b in zip(flat, in_order, strict=True))


def test_options_of_the_command_line_are_there(capsys):
    names = {name for here in ROWS.values() for name in re.findall(r"`(--[a-z]+)", here)}
    assert {"--optimize", "--dtype", "--quantize"} <= names
    assert main(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    for command in {word for here in ROWS.values() for word in re.findall(r"`yobx-flatten (\w+)", here)}:
        assert main([command, "--help"]) == 0


def test_the_line_for_torch_onnx_export_writes_a_file_whose_sizes_vary(tmp_path):
    """`export_onnx(model, args, path=...)`, and `dynamic_shapes(inputs, {...})` for `dynamic_axes`."""
    model, args = torch.nn.Linear(3, 2).eval(), (torch.zeros(4, 3),)
    export_onnx(model, args, path=tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": torch.ones(7, 3).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(torch.ones(7, 3)).detach())
    auto = torch.export.Dim.AUTO
    inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}
    assert dynamic_shapes(inputs, {"input_ids": {0: auto, 1: auto}}) == {"input_ids": {0: auto, 1: auto}}
