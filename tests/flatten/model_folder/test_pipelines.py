"""`pipeline(task, model=open_model(folder))` returns what it returns with the model, for each task that is exported."""

import json

import numpy
import pytest
import torch
from tokenizers import BertWordPieceTokenizer

pytest.importorskip("PIL")

import transformers
from PIL import Image

from tests.cases import cases
from tests.models import SIZES
from tests.transformers_versions import needs_transformers
from yobx_flatten import InvalidArgumentError, export_folder, open_model
from yobx_flatten.model_folder.source.configuration import small_config, small_model

pytestmark = [pytest.mark.slow, needs_transformers("5.23", "pipelines of these tasks take other arguments")]

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
SQUARE = {"size": {"height": 32, "width": 32}}


def letters():
    words = [*["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = BertWordPieceTokenizer(vocab={word: number for number, word in enumerate(words)})
    return transformers.BertTokenizer(tokenizer_object=made._tokenizer, model_max_length=32)


def characters(folder):
    folder.mkdir(exist_ok=True)
    words = ["<pad>", "<s>", "</s>", "<unk>", "|", *LETTERS]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    return transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))


def picture(size=32):
    drawn = numpy.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=numpy.uint8)
    return Image.fromarray(drawn)


def sound(samples):
    return numpy.random.default_rng(1).standard_normal(samples).astype(numpy.float32)


def of_type(name, kind, **options):
    config = small_config(name)
    for option, value in options.items():
        setattr(config, option, value)
    return getattr(transformers, kind)(config)


def wav2vec(kind, **options):
    shape = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    groups = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    return kind(transformers.Wav2Vec2Config(**SIZES, **shape, **groups, **options))


def dpt():
    neck = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "backbone_out_indices": [0, 1, 2, 3]}
    config = transformers.DPTConfig(**{**SIZES, "num_hidden_layers": 4}, **neck, image_size=32, patch_size=8)
    return transformers.DPTForDepthEstimation(config)


def yolos():
    config = transformers.YolosConfig(**SIZES, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=3)
    return transformers.YolosForObjectDetection(config)


def segformer():
    sizes = {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 2, 2, 2], "depths": [1, 1, 1, 1]}
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=3)
    return transformers.SegformerForSemanticSegmentation(config)


def readers(task, folder):
    match task:
        case "image-segmentation":
            return {"image_processor": transformers.SegformerImageProcessor(size={"height": 64, "width": 64})}
        case "depth-estimation":
            return {"image_processor": transformers.DPTImageProcessor(**SQUARE)}
        case "object-detection":
            return {"image_processor": transformers.YolosImageProcessor(**SQUARE, do_pad=False)}
        case "zero-shot-image-classification":
            sizes = {"size": {"shortest_edge": 32}, "crop_size": SQUARE["size"]}
            tokenizer = transformers.ByT5Tokenizer(extra_ids=0, model_max_length=32)
            return {"image_processor": transformers.CLIPImageProcessor(**sizes), "tokenizer": tokenizer}
        case "image-classification" | "image-feature-extraction":
            return {"image_processor": transformers.ViTImageProcessor(**SQUARE)}
        case "audio-classification":
            return {"feature_extractor": transformers.Wav2Vec2FeatureExtractor()}
        case "automatic-speech-recognition":
            return {"feature_extractor": transformers.Wav2Vec2FeatureExtractor(), "tokenizer": characters(folder)}
        case "text-generation":
            return {"tokenizer": transformers.ByT5Tokenizer(extra_ids=0)}
    return {"tokenizer": letters()}


# by task: makes the model, and what the pipeline is called with
TASKS = {
    "text-generation": (lambda: small_model("llama"), "hello", {"max_new_tokens": 6, "do_sample": False}),
    "fill-mask": (lambda: of_type("bert", "BertForMaskedLM", vocab_size=57), "a b [MASK] c", {}),
    "text-classification": (lambda: of_type("bert", "BertForSequenceClassification", num_labels=3), "good day", {}),
    "token-classification": (lambda: of_type("bert", "BertForTokenClassification", num_labels=3), "good day", {}),
    "feature-extraction": (lambda: of_type("bert", "BertModel"), "good day", {}),
    "image-classification": (lambda: of_type("vit", "ViTForImageClassification", num_labels=4), picture(), {}),
    "image-feature-extraction": (lambda: of_type("vit", "ViTModel"), picture(), {}),
    "object-detection": (yolos, picture(), {"threshold": 0.0}),
    "image-segmentation": (segformer, picture(64), {}),
    "depth-estimation": (dpt, picture(), {}),
    "audio-classification": (
        lambda: wav2vec(transformers.Wav2Vec2ForSequenceClassification, num_labels=4),
        sound(3200),
        {},
    ),
    "automatic-speech-recognition": (lambda: wav2vec(transformers.Wav2Vec2ForCTC, vocab_size=31), sound(3200), {}),
    "zero-shot-image-classification": (lambda: small_model("clip"), picture(), {"candidate_labels": ["cat", "dog"]}),
}


def distance(wanted, found):
    assert type(wanted) is type(found)
    if isinstance(wanted, dict):
        assert wanted.keys() == found.keys()
        return max((distance(wanted[key], found[key]) for key in wanted), default=0.0)
    if isinstance(wanted, (list, tuple)):
        assert len(wanted) == len(found)
        return max((distance(*pair) for pair in zip(wanted, found, strict=True)), default=0.0)
    if isinstance(wanted, Image.Image):
        wanted, found = numpy.asarray(wanted, dtype="float32"), numpy.asarray(found, dtype="float32")
    if isinstance(wanted, (int, float, numpy.generic, numpy.ndarray, torch.Tensor)):
        return float(numpy.abs(numpy.asarray(wanted) - numpy.asarray(found)).max())
    assert wanted == found
    return 0.0


@pytest.mark.parametrize("task", cases(list(TASKS), quick=["text-generation", "text-classification"]))
def test_a_pipeline_returns_what_it_returns_with_the_model(task, tmp_path, caplog):
    make, given, options = TASKS[task]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
    export_folder(model, tmp_path / "out", proof="none")
    read = readers(task, tmp_path / "reader")
    wanted = transformers.pipeline(task, model=model, **read)(given, **options)
    found = transformers.pipeline(task, model=open_model(tmp_path / "out"), **read)(given, **options)
    most = 1.0 if task == "depth-estimation" else 1e-4  # a picture has whole numbers
    assert distance(wanted, found) <= most
    assert "is not supported for" not in caplog.text


def test_a_class_refuses_a_folder_of_another_task_and_inputs_that_the_file_does_not_take(tmp_path):
    export_folder(small_model("bert").base_model.eval(), tmp_path / "out", proof="none")
    from yobx_flatten import OnnxForCausalLM

    with pytest.raises(InvalidArgumentError, match=r"OnnxForFeatureExtraction\.from_pretrained"):
        OnnxForCausalLM.from_pretrained(tmp_path / "out")
    model, ids = open_model(tmp_path / "out"), torch.tensor([[5, 6, 7]])
    assert model(ids).last_hidden_state.shape == (1, 3, 64)
    with pytest.raises(InvalidArgumentError, match="pass input_ids"):
        model(attention_mask=torch.ones_like(ids))
    with pytest.raises(InvalidArgumentError, match=r"shutil\.copytree"):
        model.save_pretrained(tmp_path / "copy")
