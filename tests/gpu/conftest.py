"""The device of the tests, and kernels that give the same bits twice."""

import importlib.util
import os
from collections.abc import Iterator

# Read when CUDA is used first: a product of matrices has one workspace for each stream then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from tests.gpu.models import CASES, Case
from tests.gpu.place import Place
from tests.runtime.conftest import folder_on_disk  # noqa: F401  a fixture

# Transformers imports parts of torchao with the first model, and they register nodes of pytrees for good.
if None not in map(importlib.util.find_spec, ("torchao", "transformers")):
    importlib.import_module("transformers.modeling_utils")


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place.here()
    yield made
    if "device" in vars(made):
        made.device.close()


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip("transformers")
    return CASES[request.param]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that add in one order, where torch has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
