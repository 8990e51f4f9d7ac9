"""The scripts of `examples/` learn what plain PyTorch learns, and print it."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def short_form(name, steps):
    return runpy.run_path(str(EXAMPLES / name))["main"](steps=steps)


def test_byte_text_is_learnt_alike(capsys):
    plain, piped = short_form("byte_text.py", steps=6)
    assert piped == pytest.approx(plain, rel=1e-5)
    assert len(piped) == 6
    assert piped[-1] < piped[0] - 0.5
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[:2] == ["0", f"{plain[0]:.6f}"]
    assert "Largest difference of 6 steps: " in shown


def test_digits_are_learnt_alike(capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    plain, piped = short_form("digits_resnet.py", steps=6)
    assert piped == pytest.approx(plain, rel=1e-5)
    assert piped[-1] < piped[0] - 0.3
    statistics = next(line for line in capsys.readouterr().out.splitlines() if "running statistics" in line)
    assert float(statistics.split()[-1].rstrip(".")) < 1e-5


def test_a_chat_is_trained_and_shipped_in_4_bits(tmp_path, capsys):
    for name in ("typer", "transformers", "accelerate", "onnxruntime"):
        pytest.importorskip(name, reason="the example runs both commands")
    out = runpy.run_path(str(EXAMPLES / "chat_in_4_bits.py"))["main"](folder=tmp_path)
    shown = capsys.readouterr().out
    assert "million in 4 bits" in shown
    assert shown.rstrip().endswith("holds a layer")
    assert (out / "onnx" / "model_q4.onnx").is_file()


def test_every_example_has_a_test():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
