"""Scores of the last tokens alone: the input for them, its proof, and the loop that asks for them."""

import onnx
import onnxruntime
import pytest
import torch

from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_folder, export_onnx, open_generator, open_model
from yobx_flatten.export.proof.eager_runs import Case
from yobx_flatten.export.proof.replay import check_last_scores
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.ports import KEPT_SCORES

FAMILIES = ["llama", "gemma3_text", "gpt2"]


def _session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # of an input with a value it says that it is no constant
    return onnxruntime.InferenceSession(path, options)


def _prompt():
    tokens = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return tokens, mask


def _watched(monkeypatch, decoder):
    """How many rows of scores each call of the decoder returns from now on."""
    seen, step = [], decoder.step

    def watched(*args, **options):
        found = step(*args, **options)
        seen.append(found[0]["logits"].shape[1])
        return found

    monkeypatch.setattr(decoder, "step", watched)
    return seen


@pytest.mark.parametrize("optimize", [None, "onnxruntime"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_returns_the_scores_of_as_many_last_tokens_as_are_asked_for(tmp_path, family, optimize):
    model = small_model(family)
    export_folder(model, tmp_path / "folder", optimize=optimize)
    session = _session(tmp_path / "folder" / "model.onnx")
    assert [one.name for one in session.get_overridable_initializers()] == [KEPT_SCORES]
    tokens, mask = _prompt()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    feeds = {"input_ids": tokens.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
    given = {}
    for port in session.get_inputs():
        sizes = [2 if axis == 0 else size if isinstance(size, int) else 0 for axis, size in enumerate(port.shape)]
        given[port.name] = feeds[port.name] if port.name in feeds else torch.zeros(sizes).numpy()
    for count in (None, 0, 1, 3):
        more = {} if count is None else {KEPT_SCORES: torch.tensor(count).numpy()}
        found = torch.from_numpy(session.run(["logits"], {**given, **more})[0])
        expected = wanted[:, -(count or 7) :]
        assert found.shape == expected.shape
        real = mask.bool()[:, -(count or 7) :]
        torch.testing.assert_close(found[real], expected[real], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "optimize": "onnxruntime"}])
def test_a_quantised_file_has_the_input_too(tmp_path, options):
    export_folder(small_model("llama"), tmp_path / "folder", **options)
    runner = open_runner(tmp_path / "folder" / "model.onnx")
    assert runner.has_kept_scores
    tokens, mask = _prompt()
    feeds = {"input_ids": tokens, "attention_mask": mask}
    if "position_ids" in runner.ports:
        feeds["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    empty = {slot.port.name: torch.zeros(2, slot.port.shape[1], 0, slot.port.shape[3]) for slot in runner.slots}
    every, _ = runner.step(feeds, runner.cache(empty))
    last, _ = runner.step(feeds, runner.cache(empty), last_scores=True)
    torch.testing.assert_close(last["logits"], every["logits"][:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimize", [None, "onnxruntime"])
def test_a_binding_does_not_remember_what_the_call_before_asked_for(tmp_path, optimize):
    """The last scores of a prompt, and then all scores of two further tokens: a loop with drafts."""
    model, path = small_model("llama"), tmp_path / "model.onnx"
    export_onnx(model, (), decode_inputs(model, DecodeSizes()), path, optimize=optimize)
    runner = open_runner(path)
    tokens = _prompt()[0][:1]
    cache = runner.cache({slot.port.name: torch.zeros(1, 2, 0, 16) for slot in runner.slots})
    first, cache = runner.step(
        {"input_ids": tokens[:, :5], "attention_mask": torch.ones(1, 5, dtype=torch.int64)}, cache, last_scores=True
    )
    then, _ = runner.step({"input_ids": tokens[:, 5:], "attention_mask": torch.ones(1, 7, dtype=torch.int64)}, cache)
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    found = torch.cat([first["logits"], then["logits"]], dim=1)
    torch.testing.assert_close(found, wanted[:, -3:], atol=2e-4, rtol=1e-3)


def test_the_loop_asks_for_the_last_scores_and_generates_the_tokens_of_the_model(tmp_path, monkeypatch):
    model = small_model("llama")
    export_folder(model, tmp_path / "folder", optimize="onnxruntime")
    generator = open_generator(tmp_path / "folder")
    seen = _watched(monkeypatch, generator.parts.decoder)
    tokens, mask = _prompt()
    found = generator.generate(tokens, mask, max_new_tokens=8)
    wanted = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, wanted)
    assert set(seen) == {1}


def test_a_decoder_with_an_encoder_has_no_such_input(tmp_path):
    """It begins with one token."""
    export_folder(small_model("bart"), tmp_path / "folder")
    for path in (tmp_path / "folder").glob("*.onnx"):
        names = [value.name for value in onnx.load(path, load_external_data=False).graph.input]
        assert KEPT_SCORES not in names


def test_a_file_that_returns_other_scores_is_refused():

    class Wrong:
        name, has_kept_scores, slots = "model.onnx", True, ()
        shared, ports = None, ("input_ids",)

        def cache(self, tensors):
            return {}

        def step(self, feeds, cache, *, last_scores=False):
            scores = torch.arange(12.0).reshape(1, 3, 4)
            return {"logits": scores[:, :1] if last_scores else scores}, {}

    case = Case("a text", (), {"input_ids": torch.ones(1, 3, dtype=torch.int64)})
    with pytest.raises(ReplayError, match=r"model.onnx returns scores of the last token that differ by 8\.0e\+00"):
        check_last_scores(Wrong(), ["input_ids"], [case])


def test_the_loops_of_transformers_ask_for_the_last_scores_too(tmp_path, monkeypatch):
    model = small_model("llama")
    export_folder(model, tmp_path / "folder")
    opened, (tokens, mask) = open_model(tmp_path / "folder"), _prompt()
    with torch.no_grad():
        wanted = model(input_ids=tokens, attention_mask=mask).logits
    for kept in (0, 1, 3, torch.tensor([2, 6])):
        found = opened(input_ids=tokens, attention_mask=mask, logits_to_keep=kept).logits
        places = kept if isinstance(kept, torch.Tensor) else slice(-kept or None, None)
        torch.testing.assert_close(found[1], wanted[:, places][1], atol=2e-4, rtol=1e-3)
    seen = _watched(monkeypatch, opened.steps.parts.decoder)
    given = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(tokens, attention_mask=mask, **given)
    assert torch.equal(opened.generate(tokens, attention_mask=mask, repetition_penalty=1.0, **given), plain)
    assert set(seen) == {1}
    drafted = opened.generate(tokens[1:], prompt_lookup_num_tokens=3, **given)
    assert torch.equal(drafted, model.generate(tokens[1:], **given))
    assert max(seen) > 1
