"""Replay a file with a cache buffer that is longer than the text, as a generation loop passes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...runners.onnx_runner import OnnxRunner


class InSharedMemory(OnnxRunner):
    """A file whose calls are run as a generation loop runs them, with memory for more tokens than there are."""

    runtime: ClassVar[str] = f"{OnnxRunner.runtime}, shared cache"

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`. Keys and values are returned as long as they are filled."""
        if self.refuses(inputs):
            return self.run_in_parts(inputs)
        slots = {slot.port.name: slot.present for slot in self.slots if slot.present is not None}
        given = {name: inputs[name] for name in self.ports}
        feeds = {name: value for name, value in given.items() if name not in slots}
        outputs, cache = self.step(feeds, self.cache({name: given[name] for name in slots}))
        total = given["attention_mask"].shape[1]
        filled = {}
        for name, present in slots.items():
            value = torch.from_numpy(cache[name].numpy())
            filled[present] = value[:, :, :total].clone() if name in self.shared else value
        return {**outputs, **filled}
