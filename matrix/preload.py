"""What every process of the matrix needs, imported once: libraries, no models."""

import importlib
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork
os.environ["TOKENIZERS_PARALLELISM"] = "false"
warnings.simplefilter("ignore")

for name in (
    "torch",
    "torch.export._trace",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "yobx_flatten",
    "matrix.cases",
):
    importlib.import_module(name)
