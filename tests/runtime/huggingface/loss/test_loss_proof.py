"""How losses of microbatches add up is proven for each kind of call. Llama's loss is in float32: equal within 1e-6."""

import copy
import warnings

import pytest
import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from matrix.models import make_model
from roundpipe_runtime import LossError, RoundPipeRunConfig, RoundPipeWarning
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime.huggingface.hf_small import assert_like_plain, hf_batch, known_model, without_dropout, worst_gradient

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Llama(transformers.LlamaForCausalLM):
    term = staticmethod(lambda outputs, labels: outputs.loss)

    def forward(self, *args, labels=None, **kwargs):
        outputs = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = self.term(outputs, labels)
        return outputs


def rows_alone(outputs, labels):
    return outputs.logits[:, -1].logsumexp(-1).mean()


def sum_of_squares(outputs, labels):
    return outputs.logits[:, -1].pow(2).sum()


def z_loss(outputs, labels):
    """A mean over all tokens, next to that over the labels that count."""
    return outputs.loss + outputs.logits.logsumexp(-1).pow(2).mean()


def spread(outputs, labels):
    return outputs.loss + outputs.logits[:, -1].std(0).mean()


def noise(outputs, labels):
    return (torch.rand(len(labels), 1) * outputs.logits[:, -1]).mean()


TERMS = {rows_alone: "rows", sum_of_squares: "sum", z_loss: "joined", spread: "joined", noise: "whole"}


def made(term=None, kind=Llama):
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**SIZES, vocab_size=64)).double().train()
    if term is not None:
        model.term = term
    ids = torch.randint(5, 64, (5, 6))
    labels = torch.where(torch.arange(6) < torch.tensor([[0, 1, 5, 2, 3]]).T, -100, ids)
    return model, {"input_ids": ids, "labels": labels}


def wrapped(model, **options):
    return wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0, **options)


def ways(pipeline):
    return [proof.way for proof in pipeline._rp_losses._engine.loss_checks.proofs.values()]


@pytest.mark.parametrize("way", ["forward_backward", "outputs"])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.__name__)
def test_any_term_gives_the_loss_and_gradients_of_the_plain_model(term, way):
    """What is a weighted sum runs in microbatches, what compares rows is computed once, and noise is drawn once."""
    plain, batch = made(term)
    model = copy.deepcopy(plain)
    torch.manual_seed(3)
    expected = plain(**batch).loss
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundPipeWarning)  # noise cannot be compared, so that model is one piece
        pipeline = wrapped(model)
        config = RoundPipeRunConfig(num_microbatch=3, preserve_rng_state=False)
        torch.manual_seed(3)
        if way == "outputs":
            loss = pipeline(**batch, roundpipe_run_config=config).loss
            loss.backward()
        else:
            loss = pipeline.forward_backward(input_kwargs=batch, run_config=config)
    assert ways(pipeline) == [TERMS[term]]
    if term is not noise:  # whose numbers depend on the thread that draws them
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert worst_gradient(model, plain) < 1e-6


joined_warnings = pytest.mark.filterwarnings("ignore:The loss of:roundpipe_runtime.RoundPipeWarning")
THREE = {"run_config": RoundPipeRunConfig(num_microbatch=3)}


@joined_warnings
@pytest.mark.parametrize("term", [term for term in TERMS if term is not noise], ids=lambda term: term.__name__)
def test_any_term_is_proven_where_the_code_after_the_layers_is_frozen(term):
    model, batch = made(term)
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    pipeline = assert_like_plain(model, batch, call=THREE, pipeline=wrapped(model))
    assert ways(pipeline) == [TERMS[term]]
    assert model.lm_head.weight.grad is None


class TwoNames(Llama):
    """A Llama whose table has two names and the weights of the head, as the table of T5 in transformers 4.56."""

    def __init__(self, config):
        super().__init__(config)
        head = self._modules.pop("lm_head")
        self.table = self.again = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.table.weight = head.weight
        self.lm_head = head  # after the table, whose name is that of the parameter

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * (1 + self.again.weight.square().mean())
        return outputs


def test_a_module_with_two_names_is_proven():
    model, batch = made(kind=TwoNames)
    assert ways(assert_like_plain(model, batch, call=THREE, pipeline=wrapped(model))) == ["items"]


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "gpt_neox", "olmo2"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "layers"])
def test_a_model_of_16_bits_is_proven_without_a_warning(name, frozen):
    """A mean over labels is proven in bfloat16 whatever the dtypes of the code after the layers, frozen or not."""
    plain = without_dropout(known_model(name).bfloat16())
    if frozen:
        plain.get_input_embeddings().requires_grad_(False)
        plain.get_output_embeddings().requires_grad_(False)
    model = copy.deepcopy(plain)
    batch = hf_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        pipeline = wrapped(model)
        loss = pipeline.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=3))
    assert ways(pipeline) == ["items"]
    assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=2**-8)


def test_a_proof_changes_nothing():
    model, batch = made()
    model.model.register_buffer("seen", torch.zeros(1))
    pipeline = wrapped(model)
    config = pipeline._rp_config(RoundPipeRunConfig(num_microbatch=3))
    torch.manual_seed(5)
    before, step = torch.get_rng_state(), pipeline._rp_engine.step
    assert pipeline._rp_losses.find((), batch, config).way == "items"
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline._rp_engine.step == step
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_proof_serves_all_calls_of_a_kind():
    model, batch = made()
    pipeline = wrapped(model)
    for _ in range(3):
        pipeline.forward_backward(input_kwargs=batch)
    assert len(pipeline._rp_losses._engine.loss_checks.proofs) == 1
    pipeline.eval()
    with torch.no_grad():
        assert pipeline(**batch).loss.item() == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-6)
    assert ways(pipeline) == ["items", "items"]


@joined_warnings
@pytest.mark.parametrize("optim_dtype", [None, torch.float64], ids=["own", "copies"])
@pytest.mark.parametrize("term", [None, rows_alone, z_loss], ids=["items", "rows", "joined"])
def test_a_repeated_proof_leaves_a_step_in_the_background_one_step_late(term, optim_dtype):
    """Calls 2 and 4 prove the loss with the weights before the step; a joined loss, with a second run, waits for it."""
    plain, batch = made(term)
    plain = plain.float()
    model = copy.deepcopy(plain)
    pipeline = wrapped(model, optim_dtype=optim_dtype)
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=0.5)
    found, expected, pending = [], [], ()
    for _ in range(5):
        found.append(pipeline.forward_backward(input_kwargs=batch).item())
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
        loss = plain(**batch).loss
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        late, pending = pending or [torch.zeros_like(one) for one in gradients], gradients
        with torch.no_grad():
            now = gradients if term is z_loss else late
            for parameter, gradient in zip(plain.parameters(), now, strict=True):
                parameter -= 0.5 * gradient
    assert found == pytest.approx(expected, rel=1e-5)
    assert (expected[0] == expected[1]) == (term is not z_loss)


@joined_warnings
@pytest.mark.parametrize(
    ("term", "expected"),
    [(rows_alone, "weighted by rows, checked with"), (spread, "computed once for the whole batch")],
)
def test_the_report_states_how_losses_are_computed(term, expected):
    model, batch = made(term)
    pipeline = wrapped(model)
    for _ in range(2):
        pipeline.forward_backward(input_kwargs=batch)
    (line,) = (line for line in str(pipeline.cut.report).splitlines() if line.startswith("loss in"))
    assert line.startswith("loss in training with input_ids, labels, use_cache: ")
    assert expected in line


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("term", [None, rows_alone, z_loss], ids=["items", "rows", "joined"])
def test_a_group_with_few_rows_proves_its_loss(rows, term):
    """One microbatch of one row is a part of the batch where other groups have others: the row is tried three times."""
    model, batch = made(term)
    batch = {name: value[2 : 2 + rows] for name, value in batch.items()}
    pipeline = wrapped(model, replicas=rows)
    one = {"run_config": RoundPipeRunConfig(num_microbatch=1)}
    if term is not None and rows > 1:
        known = r"not known to be a mean .*, in one process:\n    RoundPipeRunConfig\(num_micro"
        with pytest.raises(LossError, match=known):
            pipeline.forward_backward(input_kwargs=batch, **one)
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        assert_like_plain(model, batch, call=one, pipeline=pipeline)
    assert ways(pipeline) == ["items" if term is None else TERMS[term]]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("function", "fits"), [(lambda outputs, _: 2 * outputs.loss, True), (z_loss, False)])
def test_a_function_of_the_loss_in_a_group_with_few_rows_is_proven(function, fits, rows):
    model, batch = made()
    batch = {name: value[2 : 2 + rows] for name, value in batch.items()}
    call = {"loss_fn": function, "run_config": RoundPipeRunConfig(num_microbatch=1)}
    pipeline = wrapped(model, replicas=rows)
    if fits or rows == 1:
        assert_like_plain(model, batch, lambda plain: function(plain(**batch), None), call=call, pipeline=pipeline)
    else:
        with pytest.raises(LossError):
            pipeline.forward_backward(input_kwargs=batch, **call)


@pytest.mark.parametrize("options", [{"num_microbatch": 1}, {"num_microbatch": 3, "loss_reduction": "joined"}], ids=str)
def test_one_microbatch_and_a_joined_loss_are_not_proven(options):
    model, batch = made(spread)
    call = {"run_config": RoundPipeRunConfig(**options)}
    assert not assert_like_plain(model, batch, call=call, pipeline=wrapped(model))._rp_losses._engine.loss_checks.proofs


@joined_warnings
@pytest.mark.parametrize("term", [rows_alone, z_loss], ids=lambda term: term.__name__)
def test_weights_of_16_bits_are_proven_as_strictly(term):
    """Rounding of bfloat16 hides no wrong weights, as the proof widens them."""
    model, batch = made(term)
    pipeline = wrapped(model.bfloat16())
    pipeline.forward_backward(input_kwargs=batch)
    assert ways(pipeline) == [TERMS[term]]


@joined_warnings
def test_masks_count_like_labels():
    """Pictures with as many masked patches each, then with others: the second batch is exact, too."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=4, encoder_stride=4)
    model = transformers.ViTForMaskedImageModeling(config).double().train()
    masks = torch.arange(16) < torch.tensor([[4, 4, 4, 4, 4], [1, 9, 4, 2, 16]])[..., None]
    pictures = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    batches = [{"pixel_values": pictures, "bool_masked_pos": mask} for mask in masks]
    pipeline = wrapped(model, example={name: value[:2] for name, value in batches[0].items()})
    for batch in batches:
        model.zero_grad()
        assert_like_plain(model, batch, call=THREE, pipeline=pipeline)


@pytest.mark.parametrize("padded", [[0, 1], [0], [5], [2]], ids=str)
def test_a_mask_that_some_rows_do_not_need_is_proven_on_rows_alike(padded):
    """Zaya hands its layers a mask only where a row is padded: it runs in microbatches, with the plain numbers."""
    model = copy.deepcopy(make_model("zaya").train())  # it computes in float32, whatever its weights are
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[padded, :4] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert ways(assert_like_plain(model, batch, rel=1e-5, call=THREE, pipeline=wrapped(model))) == ["items"]


@joined_warnings
def test_a_penalty_without_labels_in_the_example_is_seen():
    class Regularised(transformers.LlamaForCausalLM):
        def forward(self, *args, labels=None, **kwargs):
            outputs = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                named = self.named_parameters()
                outputs.loss = outputs.loss + sum(p.pow(2).sum() for name, p in named if "q_proj" in name)
            return outputs

    model, batch = made(kind=Regularised)
    with pytest.warns(RoundPipeWarning, match="as one module"):
        pipeline = wrapped(model)
    assert_like_plain(model, batch, call=THREE, pipeline=pipeline)


# Losses that are computed once for the whole batch, or depend on values.


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROWS = 5


def speech():
    dropouts = ("hidden", "attention", "feat_proj", "activation", "final")
    config = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=20, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2,
        layerdrop=0.0, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, pad_token_id=0,
        apply_spec_augment=False, **{f"{name}_dropout": 0.0 for name in dropouts},
    )  # fmt: skip
    batch = {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(1, 20, (ROWS, 3))}
    return transformers.Wav2Vec2ForCTC(config), batch


def pairs():
    text = {**SIZES, "vocab_size": 100, "eos_token_id": 99, "bos_token_id": 98, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config={**SIZES, "image_size": 16, "patch_size": 8})
    batch = {"input_ids": torch.randint(5, 98, (ROWS, 8)), "pixel_values": torch.randn(ROWS, 3, 16, 16)}
    return transformers.CLIPModel(config), {**batch, "return_loss": True}


def masked_pictures():
    """It takes no labels."""
    decoder = {f"decoder_{name}": size for name, size in SIZES.items()}
    config = transformers.ViTMAEConfig(**SIZES, **decoder, image_size=16, patch_size=4, mask_ratio=0.5)
    batch = {"pixel_values": torch.randn(ROWS, 3, 16, 16), "noise": torch.rand(ROWS, 16)}
    return transformers.ViTMAEForPreTraining(config), batch


def answers():
    """Two means, and one microbatch has no end of an answer."""
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, **QUIET, vocab_size=100))
    places = {"start_positions": torch.arange(ROWS), "end_positions": torch.tensor([99, 99, 3, 5, 6])}
    return model, {"input_ids": torch.randint(5, 95, (ROWS, 8)), **places}


KINDS = {
    "sum over rows": (speech, "sum"),
    "pairs": (pairs, "joined"),
    "no labels": (masked_pictures, "rows"),
    "two means": (answers, "joined"),
}


def model_of(name):
    torch.manual_seed(0)
    model, batch = KINDS[name][0]()
    batch = {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in batch.items()
    }
    return model.double().train(), batch


def first_rows(batch, rows=2):
    return {key: value[:rows] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize("way", ["forward_backward", "outputs", "loss_fn"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_whole_batch(name, way):
    plain, batch = model_of(name)
    model = copy.deepcopy(plain)
    try:
        expected = plain(**batch).loss
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        pytest.skip("4.56 fills CLIP's mask, in float32, with the least number of float64: the model itself fails")
    expected.backward()
    pipeline = wrapped(model, example=first_rows(batch))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for microbatches in (1, 2, 3):
            config = RoundPipeRunConfig(num_microbatch=microbatches)
            model.zero_grad()
            if way == "outputs":
                loss = pipeline(**batch, roundpipe_run_config=config).loss
                loss.backward()
            else:
                own = {} if way == "forward_backward" else {"loss_fn": lambda outputs, _: outputs.loss * 1.0}
                if own and name in ("pairs", "no labels"):
                    own = {}  # without labels, a function's value is a loss of its microbatch
                loss = pipeline.forward_backward(input_kwargs=batch, run_config=config, **own)
            limit = 1e-6 if name == "sum over rows" else 1e-9  # transformers computes CTC in float32
            assert loss.item() == pytest.approx(expected.item(), rel=limit)
            assert worst_gradient(model, plain) < limit
    way = KINDS[name][1]
    assert set(ways(pipeline)) == {way}
    said = [str(one.message) for one in heard if issubclass(one.category, RoundPipeWarning)]
    assert len(said) == (way in ("joined", "whole"))
    words = f"The loss of {type(plain).__name__} cannot be computed from the losses of microbatches:"
    assert all(one.startswith(words) for one in said)


@pytest.mark.slow
def test_a_batch_does_not_change_how_the_next_one_is_computed():
    """Where only some batches have means over different numbers of labels, the bits of the others stay the same."""
    model, odd = model_of("two means")
    even = {**odd, "end_positions": torch.arange(ROWS)}
    losses = []
    for batches in ([even], [odd, even]):
        pipeline = wrapped(copy.deepcopy(model), example=first_rows(odd))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundPipeWarning)
            found = [pipeline.forward_backward(input_kwargs=batch) for batch in batches]
        losses.append((found[-1].item(), len(pipeline._rp_losses._engine.loss_checks.proofs)))
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(model(**even).loss.item(), rel=1e-9)


F = torch.nn.functional
CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100, num_labels=4,
    pad_token_id=0,
)  # fmt: skip


def each(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


# a loss of logits and labels, and how it is computed
LOSSES = {
    "of one class": (lambda x, y: each(x, y)[y == 1].mean(), "joined"),
    "by a product": (lambda x, y: (each(x, y) * (y == 1)).sum() / (y == 1).sum().clamp(min=1), "joined"),
    "with a term of one class": (
        lambda x, y: F.cross_entropy(x, y) + (x.square().mean() if (y == 2).any() else 0),
        "joined",
    ),
    "of confident rows": (lambda x, y: each(x, y)[x.softmax(-1).amax(-1) > 0.276].mean(), "joined"),
    "by a limit": (lambda x, y: F.cross_entropy(x, y) * (2 if y.max().item() > 2 else 1), "joined"),
    "of rows": (lambda x, y: torch.where(x.argmax(-1) == y, each(x, y), 2 * each(x, y)).mean(), "rows"),
    "of labels": (lambda x, y: F.cross_entropy(x, y), "items"),
}


class Classifier(transformers.LlamaForSequenceClassification):
    def __init__(self, config, loss_of):
        super().__init__(config)
        self.loss_of = loss_of

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return SequenceClassifierOutput(loss=None if labels is None else self.loss_of(logits, labels), logits=logits)


@joined_warnings
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "in one piece"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_plain_model(name, is_cut):
    torch.manual_seed(0)
    loss_of, way = LOSSES[name]
    model = Classifier(CONFIG, loss_of).double()
    ids, labels = torch.randint(5, 100, (9, 10)), torch.tensor([1, 1, 1, 0, 2, 1, 0, 3, 1])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    pipeline = wrapped(model, use_sequential_preset=is_cut or False)
    assert_like_plain(model, batch, call=THREE, pipeline=pipeline)
    way = way if is_cut or way != "joined" else "whole"
    assert [proof.way for proof in pipeline._rp_losses._engine.loss_checks.proofs.values()] == [way]
