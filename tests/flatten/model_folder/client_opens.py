"""Open an exported folder with another library, in its own environment, where this package is not installed.

``python client_opens.py KIND FOLDER INPUTS OUTPUT``: the inputs are arrays in an npz file, or a list of texts in a JSON
file; what the library returns is written to an npz file.
"""

import json
import sys

import numpy

_CLASSES = {
    "text-generation": "ORTModelForCausalLM",
    "text2text-generation": "ORTModelForSeq2SeqLM",
    "automatic-speech-recognition": "ORTModelForSpeechSeq2Seq",
    "text-classification": "ORTModelForSequenceClassification",
}


def main(kind: str, folder: str, given: str, output: str) -> None:
    if kind in ("sentences", "pairs"):
        import sentence_transformers

        with open(given, encoding="utf-8") as file:
            texts = json.load(file)
        if kind == "sentences":
            found = sentence_transformers.SentenceTransformer(folder, backend="onnx").encode(texts)
        else:
            found = sentence_transformers.CrossEncoder(folder, backend="onnx").predict(texts)
    else:
        import torch
        from optimum import onnxruntime

        inputs = {name: torch.from_numpy(value) for name, value in numpy.load(given).items()}
        model = getattr(onnxruntime, _CLASSES[kind]).from_pretrained(folder)
        if kind == "text-classification":
            found = model(**inputs).logits.numpy()
        else:
            found = model.generate(**inputs, max_new_tokens=12, do_sample=False).numpy()
    numpy.savez(output, found=found)


if __name__ == "__main__":
    main(*sys.argv[1:])
