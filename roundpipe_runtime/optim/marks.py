"""A mark of a tensor shows later whether it was written, also by way of ``tensor.data``, which torch does not count."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from yobx_flatten.private_names.of_torch import is_traceable_wrapper_subclass

# Numbers of a tensor that are compared.
_SAMPLE = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What a tensor looked like.

    >>> tensor = torch.zeros(100)
    >>> mark = Mark.of(tensor)
    >>> tensor.data.fill_(1).sum().item(), mark.is_counted(tensor), mark.has_numbers(tensor)
    (100.0, False, False)
    """

    source: weakref.ref[torch.Tensor]
    version: int
    address: int
    sample: torch.Tensor | None  # some numbers, as bytes; `None` where they are not compared

    @classmethod
    def of(cls, tensor: torch.Tensor, *, with_numbers: bool = True) -> Mark:
        """Return the mark of a tensor as it is now."""
        if not is_plain(tensor):
            return cls(weakref.ref(tensor), tensor._version, 0, None)
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), _sample(tensor) if with_numbers else None)

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Report whether this is another tensor, or torch has counted a write of it."""
        return self.source() is not tensor or self.version != tensor._version

    def has_numbers(self, tensor: torch.Tensor) -> bool:
        """Report whether some of its numbers, spread over the tensor, are the same."""
        return self.sample is None or torch.equal(self.sample, _sample(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Report whether writes of a tensor are seen: of a tensor that is made of others, those have the numbers."""
    is_itself = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return is_itself and not tensor.is_inference()  # such a tensor has no version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat, size = tensor.detach(), int(tensor.numel())
    if not flat.is_contiguous():
        held = flat.untyped_storage().nbytes() // flat.element_size() - int(flat.storage_offset())
        size = min(size, held)
    step = max(1, size // _SAMPLE)
    return flat.as_strided((min(_SAMPLE, size // step),), (step,)).clone().view(torch.uint8)
