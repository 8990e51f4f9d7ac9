"""Verify the files of an exported folder with stored test cases, without the model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..core.files.document import inside
from ..diagnose.comparison import Report
from ..errors import DamagedFileError, FlattenError, ReplayError
from ..errors.failures import first_line, table
from ..export.proof.quality import Distance, Quality, text_losses
from ..export.proof.replay import Padding
from ..export.proof.report import PART_OF_FLOAT32, explained
from ..export.quantization import CHAT_SHARES, TOKEN_SHARES, text_scores
from ..generate.generator import Generator, generator_for
from ..generate.sampling import Sampling
from ..generate.settings import SUBFOLDER, located
from ..generate.spectrogram import speak
from ..registry.patches import AttributePatch
from ..runners import onnx_session
from ..runners.adapters import ADAPTERS, Adapter, read_adapter, rooms_of_files
from ..runners.onnx_runner import OnnxRunner
from ..runners.open import open_runner
from ..runners.ports import Runner
from ..storage.cases import StoredCase, load_case, run_case
from .manifest import FolderManifest, check_digests, check_folder, read_manifest
from .pieces.spoken import NEVER
from .pieces.tasks import SPEAKS
from .texts import CHATS

_MOST_OF_TOLERANCE = 10  # largest factor on the tolerance of its dtype that a folder may state for near ties of logits
_OF_DEVICES = 10  # factor on the tolerance for onnxruntime's providers other than the CPU provider


@dataclasses.dataclass(frozen=True)
class FolderCheck:
    """The comparison of an exported folder's files with the model on one stored test case.

    Attributes:
        file: name of the exported file; ``"generate"`` if the test case generates tokens or speech with all files.
        case: name of the stored test case.
        difference: largest absolute difference of an output; for generated tokens, the number of tokens that differ
            from the tokens of ``model.generate``.
        ok: whether the difference is within the folder's tolerance.
        seconds: duration of the test case in seconds.
        error: message of the error that stopped the test case; ``None`` if there was no error.
        quality: the measured quality of a file with quantised weights; ``None`` for other files.
        nan: share of NaN values in each output of the model, by output name.
        tokens: the comparison of generated tokens; ``None`` if the test case generates no tokens.
        adapter: name of the LoRA adapter with which the test case ran; ``""`` if it ran without an adapter.
    """

    file: str
    case: str
    difference: float
    ok: bool
    seconds: float
    error: str | None = None
    quality: Quality | None = None
    nan: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tokens: TokenCount | None = None
    adapter: str = ""

    def cells(self) -> list[str]:
        """Return a table row for a report: whether the check passed, file, test case, and difference or error."""
        found = self.quality if self.quality is not None else self.tokens
        what = "its frames" if self.file == "generate" else "its first call"
        shown = f"{self.difference:.1e} max difference of {what}" if found is None else str(found)
        where = f"{self.adapter}: {self.file}" if self.adapter else self.file
        return [f"{'ok  ' if self.ok else 'FAIL'} {where}", self.case, self.error or shown]


@dataclasses.dataclass(frozen=True)
class FolderReport(Report):
    """The results of all stored test cases: ``print(report)`` shows a table; the report is true if all cases pass.

    Attributes:
        path: the folder.
        manifest: the description of the folder in ``yobx_flatten.json``.
        checks: the comparison with the model for each stored test case, or for all test cases of a quantized file.
    """

    path: pathlib.Path
    manifest: FolderManifest
    checks: tuple[FolderCheck, ...]

    @property
    def tolerance(self) -> float:  # type: ignore[override] # the folder's own
        """Largest absolute difference that is allowed for the outputs of files without quantized weights."""
        return self.manifest.tolerance

    def differences(self) -> Iterator[float]:
        """Yield the largest difference of each test case of a single file; test cases of ``generate`` are left out."""
        return (check.difference for check in self.checks if check.file != "generate")

    def nan_shares(self) -> Iterator[Mapping[str, float]]:
        """Yield, for each test case, the share of NaN values in each output of the model."""
        return ({f"{check.file}: {name}": share for name, share in check.nan.items()} for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether every test case passes; ``False`` without test cases, or if an output of the model is only NaN."""
        return bool(self.checks) and all(check.ok for check in self.checks) and not self.without_number()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        title = f"{self.path}: {self.manifest.model}, {self.manifest.task}, {self.manifest.dtype}"
        if not self.checks:
            return f'{title}\n  UNPROVEN: the folder has no cases, since it was exported with proof="none".'
        notes = [f"  note: {note}" for note in self.nan_notes()]
        return "\n".join([title, *table(check.cells() for check in self.checks), *notes])


def verify_folder(
    folder: str | os.PathLike[str],
    *,
    on_check: Callable[[str], None] | None = None,
    trust: bool = False,
    device: str | None = None,
    providers: onnx_session.Providers | None = None,
) -> FolderReport:
    """Run the files of an exported folder on all stored test cases, and compare outputs and generated tokens.

    Args:
        folder: a folder that :func:`export_folder` wrote.
        on_check: a function that is called with the name of each test case before the test case runs.
        trust: whether the caller trusts the author of the folder, which is needed for ``.pt2`` files only;
            ``False`` by default. See :func:`open_generator`.
        device: the device of onnxruntime, see :func:`open_generator`; the CPU by default. On devices other than the
            CPU, the tolerance is ten times larger, because these devices round differently.
        providers: execution providers in the form that onnxruntime takes, as an alternative to ``device``.

    Returns:
        A report with the comparison for each stored test case.

    Raises:
        ForeignFileError: when ``folder`` does not exist, or :func:`export_folder` did not write it.
        DamagedFileError: when a test case or the manifest cannot be read, or a file changed after the export.
        UntrustedFileError: when a file runs code on loading, and ``trust`` is ``False``.
        GenerationError: when a file cannot be loaded.
        MissingDependencyError: when a library that runs the files is not installed.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(LlamaForCausalLM(config).eval(), f"{folder}/llama", to="program")
    ...     report = verify_folder(f"{folder}/llama", trust=True)
    >>> report.ok, report.checks[-1].file
    (True, 'generate')
    """
    path = check_folder(folder)
    manifest = read_manifest(path)
    check_digests(path, manifest.sha256)
    onnx_session.only_for_onnxruntime(manifest.runtime, device, providers)
    if device not in (None, "cpu") or providers is not None:
        onnx_session.require_onnxruntime("verify_folder")
        if not onnx_session.is_on_cpu(onnx_session.choose_providers(device, providers)):  # devices round differently
            stated = {f: {o: _OF_DEVICES * t for o, t in of.items()} for f, of in manifest.tolerances.items()}
            tolerance = _OF_DEVICES * manifest.tolerance
            manifest = dataclasses.replace(manifest, tolerance=tolerance, tolerances=stated)
    opened = _Opened(path, manifest, trust=trust, device=device, providers=providers)
    checks = _checks(opened, path, manifest.cases, manifest.quality, on_check)
    rooms = rooms_of_files(path) if manifest.adapters else {}
    for name, stored in manifest.adapters.items():
        opened.adapter = name
        opened.matrices = read_adapter(inside(path, f"{ADAPTERS}/{name}.safetensors", DamagedFileError), rooms)
        checks += _checks(opened, path, stored.cases, stored.quality, on_check)
    return FolderReport(path, manifest, tuple(checks))


def check_adapter(
    folder: pathlib.Path, adapter: Adapter, cases: Mapping[str, list[str]], folder_of_cases: pathlib.Path
) -> list[FolderCheck]:
    manifest = read_manifest(folder)
    opened = _Opened(folder, manifest)
    opened.adapter, opened.matrices = adapter.name, dict(adapter.matrices)
    return _checks(opened, folder_of_cases, cases, manifest.quality, None)


@onnx_session.without_spinning()
def _checks(
    opened: _Opened,
    path: pathlib.Path,
    cases: Mapping[str, list[str]],
    qualities: Mapping[str, Quality],
    on_check: Callable[[str], None] | None,
) -> list[FolderCheck]:
    say = on_check or (lambda name: None)
    checks = []
    for name, quality in qualities.items():
        paths = cases.get(name, [])
        say(f"{name}: {len(paths)} cases")
        checks.append(_check_quality(path, name, quality, paths, opened))
    for name, case_path in ((name, one) for name, paths in cases.items() for one in paths):
        if name not in qualities:
            case = load_case(inside(path, case_path, DamagedFileError))
            say(f"{name or 'generate'}: {case.name}")
            checks.append(_check_case(opened, name, case, is_chat=case_path == CHATS))
    return [dataclasses.replace(check, adapter=opened.adapter) for check in checks]


def _check_case(opened: _Opened, name: str, case: StoredCase, *, is_chat: bool) -> FolderCheck:
    """Run a stored test case with the exported file ``name``; if ``name`` is empty, generate with all files."""
    manifest, tokens = opened.manifest, None
    nan: Mapping[str, float] = {}
    file = opened(name)  # a file that cannot be opened raises an error, and is not a failed check
    start = time.perf_counter()
    try:
        if file is None and manifest.task in SPEAKS:
            costs = [cost for outputs in manifest.tolerances.values() for cost in outputs.values()]
            frames, expected = len(case.inputs["dropout_masks"]), case.outputs["spectrogram"]
            # the difference of a frame adds to the differences of the frames after it
            allowed = explained(frames * max(costs), expected) if costs else 0.0
            given, generator = dict(case.inputs), generator_for(opened.folder, **opened.how)
            read = given.pop("input_ids", None)
            read = given.pop("input_values") if read is None else read
            masks, ratio = iter(given.pop("dropout_masks")), case.outputs["maxlenratio"]
            asked = {**given, "threshold": NEVER, "maxlenratio": ratio, "return_output_lengths": True}
            found = speak(generator.parts, generator.settings, read, asked, masks)[0]
            fits = found.shape == expected.shape
            difference = float((found.float() - expected.float()).abs().max()) if fits else float("inf")
            ok = difference <= max(manifest.tolerance, allowed)
        elif file is None:
            tokens = _check_tokens(opened, case, is_chat=is_chat)
            difference, ok = float(tokens.different), tokens.ok
        else:
            report = run_case(case, file, tolerance=manifest.tolerance)
            difference, (nan,) = report.max_difference, report.nan_shares()
            ok = True
            for one in report.outputs:  # within the measured rounding error, or else within the tolerance
                stated, value = manifest.tolerances.get(name, {}).get(one.name), case.outputs.get(one.name)
                limit = manifest.tolerance
                if stated is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
                    part = {"part": PART_OF_FLOAT32} if manifest.dtype == "float32" else {}
                    limit = explained(stated, value, **part)
                ok = ok and one.error is None and one.difference <= limit
        error = None
    except (FlattenError, OSError) as failed:
        difference, ok, error = float("inf"), False, first_line(failed)
    seconds = time.perf_counter() - start
    return FolderCheck(name or "generate", case.name, difference, ok, seconds, error, nan=nan, tokens=tokens)


def _check_quality(folder: pathlib.Path, name: str, stored: Quality, cases: list[str], opened: _Opened) -> FolderCheck:
    runner, distance = opened(name), Distance()
    assert runner is not None
    start = time.perf_counter()
    shown = f"{len(cases)} cases"
    try:
        for case in (load_case(inside(folder, one, DamagedFileError)) for one in cases):
            if "losses" in case.outputs:
                scores = text_scores(runner, case.inputs, case.outputs.get("text"))
                distance.add_text(case.outputs, text_losses(scores, case.inputs["input_ids"]))
                continue
            outputs = runner.run({name: case.inputs[name] for name in runner.ports})
            missing = next((name for name in case.outputs if name not in outputs), None)
            if missing is not None:
                raise ReplayError(f"{runner.name} lacks output {missing} of the test case.")
            padding = Padding()
            padding.next_call(case.inputs)
            expected = {name: value for name, value in case.outputs.items() if isinstance(value, torch.Tensor)}
            sides: list[dict[str, Any]] = [
                {name: padding.blank(name, side[name]) for name in expected} for side in (expected, outputs)
            ]
            distance.add(*sides)
        found = distance.quality(stored.weights, stored.block_size, stored.allowed)
    except (ReplayError, KeyError) as failed:
        return FolderCheck(name, shown, float("inf"), False, time.perf_counter() - start, first_line(failed))
    return FolderCheck(name, shown, found.max_difference, found.ok, time.perf_counter() - start, None, found)


class _Opened:
    """Opens the files of a folder one at a time; a call with the name ``""`` closes the open file."""

    def __init__(self, folder: pathlib.Path, manifest: FolderManifest, **how: Any) -> None:
        self.folder, self.manifest, self._name = folder, manifest, ""
        self.how = {"runtime": manifest.runtime, **how}
        self.adapter = ""  # name of the adapter that files run with; `""` for none
        self.matrices: dict[str, torch.Tensor] = {}  # the matrices of the adapter
        self._runner: Runner | None = None

    def __call__(self, name: str) -> Runner | None:
        if self._runner is None or name != self._name:
            self._name, self._runner = name, None  # a large file is closed before the next is opened
            if name:
                found = located(self.folder, name).relative_to(self.folder).as_posix()
                path = inside(self.folder, found, DamagedFileError)
                # quantized weights are not memory-mapped, because onnxruntime would then add in a different order
                maps = name not in self.manifest.quality and onnx_session.has_mapped_weights(path)
                options = onnx_session.mapped_options(path) if maps else None
                self._runner = open_runner(path, caller="verify_folder", options=options, **self.how)
        if self.adapter and isinstance(self._runner, OnnxRunner):
            return self._runner.with_adapter(self.matrices)
        return self._runner


def _check_tokens(opened: _Opened, case: StoredCase, *, is_chat: bool) -> TokenCount:
    # If the two best scores for a token are almost equal (a tie), rounding may change their order, and the rest of the
    # sequence may differ. With quantized weights, other scores also change, so only a share of tokens must agree.
    folder, manifest = opened.folder, opened.manifest
    scores = [outputs["logits"] for outputs in manifest.tolerances.values() if "logits" in outputs]
    tolerance = max([manifest.tolerance, *(min(one, _MOST_OF_TOLERANCE * manifest.tolerance) for one in scores)])
    mapped = any(map(onnx_session.has_mapped_weights, [*folder.glob("*.onnx"), *folder.glob(f"{SUBFOLDER}/*.onnx")]))
    pack = bool(manifest.quality) or not mapped  # during an export, the model may be in memory with the files
    generator = generator_for(folder, pack=pack, **opened.how)
    if opened.adapter:
        generator.of_folder.hold(opened.adapter, opened.matrices)
        generator = generator.with_adapter(opened.adapter)
    if "input_features" in case.inputs:  # the case has only the start token; Whisper's own loop would add others
        begun = {"decoder_input_ids": case.outputs["sequences"][:, :1], **case.inputs}
        case = dataclasses.replace(case, inputs=begun)
    limits = CHAT_SHARES if is_chat else TOKEN_SHARES
    shares = [limits[quality.weights] for quality in manifest.quality.values() if quality.weights in limits]
    return count_tokens(generator, case, tolerance, min(shares, default=None))


@dataclasses.dataclass(frozen=True)
class TokenCount:
    tokens: int  # number of new tokens of the model, up to the end of each row
    # number of different tokens; quantized files choose each token after the model's own text, others after their own
    different: int
    # number of different tokens in rows whose first different token is a tie: two almost equal scores of the model
    excused: int
    # for quantized files: share of the tokens that are equal or a tie
    agreed: float | None = None
    allowed: float | None = None  # smallest allowed share; `None` if no token may differ

    @property
    def ok(self) -> bool:
        """Whether rounding explains every differing token or, for a quantized file, whether enough tokens are equal."""
        if self.agreed is None or self.allowed is None:
            return self.different == self.excused
        return self.agreed >= self.allowed

    def __str__(self) -> str:
        shown = f"{self.different} of {self.tokens} tokens differ" if self.different else "0 tokens differ"
        if self.excused and self.agreed is None:
            shown += f", {self.excused} of them excused: after a tie of two scores within float rounding"
        if self.agreed is None or self.allowed is None:
            return shown
        return f"{shown} after the model's own text: {self.agreed:.1%} agree, at least {self.allowed:.0%} have to"


def count_tokens(generator: Generator, case: StoredCase, tolerance: float, share: float | None = None) -> TokenCount:
    # share: for quantized weights, the share of tokens that must agree, each chosen after the model's own text;
    # `None` if all tokens must agree
    expected: torch.Tensor = case.outputs["sequences"]
    margins: torch.Tensor | None = case.outputs.get("margins")  # folders of earlier versions have no margins
    prompt = case.inputs.get("input_ids")
    length = 0 if prompt is None else prompt.shape[1]
    begins = prompt is not None and length < expected.shape[1] and torch.equal(expected[:, :length], prompt)
    start = length if begins else 1  # the output of an encoder-decoder begins with a start token
    # tokens that the model generated, without padding after the end of a sequence
    ends = torch.isin(expected, torch.tensor(generator.settings.eos_token_ids, dtype=torch.int64))
    ends[:, :start] = False
    read = (ends.cumsum(1) - ends.long()) == 0
    read[:, :start] = False
    how: dict[str, Any] = {"max_new_tokens": case.outputs["new_tokens"]}
    how |= {"sampling": Sampling(), "num_beams": 1, "num_return_sequences": 1}  # not the folder's defaults
    # each of the two scores may be off by the tolerance
    ties = torch.zeros_like(read) if margins is None else margins <= 2 * tolerance
    settings = dataclasses.replace(generator.settings, other_loops=())
    if share is None:
        with AttributePatch(generator, "settings", settings):
            found = generator.generate(**case.inputs, **how)
        same = torch.zeros_like(read)
        if len(found) == len(expected):
            length = min(found.shape[1], expected.shape[1])
            same[:, :length] = found[:, :length] == expected[:, :length]
        differs = ~same & read  # tokens that differ or are missing
        first = differs & (differs.cumsum(1) == 1)
        excused = differs & (first & ties).any(1, keepdim=True)
        return TokenCount(int(read.sum()), int(differs.sum()), int(excused.sum()))
    chosen = torch.full_like(expected, -1)  # -1 stays if the files end before the model does

    def follow(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = tokens.shape[1]
        chosen[:, place] = scores.argmax(-1)
        return torch.full_like(scores, -torch.inf).scatter(1, expected[:, place, None], 0.0)

    how["max_new_tokens"] = expected.shape[1] - start
    settings = dataclasses.replace(settings, processors=(*settings.processors, follow))
    with AttributePatch(generator, "settings", settings):
        generator.generate(**case.inputs, **how)
    differs = (chosen != expected) & read
    free = read if margins is None else read & margins.isfinite()  # without tokens that a rule forces
    total, agreed = int(free.sum()), int((free & (~differs | ties)).sum())
    counts = int(read.sum()), int(differs.sum()), int((differs & ties).sum())
    return TokenCount(*counts, agreed / total if total else 1.0, share)
