"""Layers whose frozen weights are in 4 and 8 bits, in the forms that libraries use; written here, so none is installed.

- `packed`: the weight is a wrapper subclass, made of two tensors, as those of torchao
- `stated`: the weight is bytes with a state in an attribute, whose scales have scales again, as those of bitsandbytes;
  its layer packs it in another way when it is evaluated
- `moved`: the weight brings its scale to the state of its module in the first forward, as 8 bits of bitsandbytes
"""

import torch
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig

WIDTH = 64
BLOCK = 32
KINDS = ["packed", "stated", "moved"]


def quantised(weight):
    """Two numbers per byte, and a scale for each 32 of them."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1) / 7
    numbers = (blocks / scale[:, None]).round().clamp(-8, 7).add(8).to(torch.uint8).reshape(-1)
    return numbers[::2] | (numbers[1::2] << 4), scale


def dequantised(numbers, scale, shape):
    numbers = numbers.reshape(-1)
    values = torch.stack([numbers & 15, numbers >> 4], 1).reshape(-1, BLOCK).to(scale.dtype) - 8
    return (values * scale[:, None]).reshape(shape)


class Packed(torch.Tensor):
    """A matrix in 4 bits that is made of two tensors, and that no operator copies."""

    @staticmethod
    def __new__(cls, numbers, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale, shape):
        self.numbers, self.scale, self.whole = numbers, scale, shape

    def __tensor_flatten__(self):
        return ["numbers", "scale"], self.whole

    @classmethod
    def __tensor_unflatten__(cls, inner, shape, size, stride):
        return cls(inner["numbers"], inner["scale"], shape)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = (*args, None)[:3]
            return x @ dequantised(weight.numbers, weight.scale, weight.whole).T + (0 if bias is None else bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale, args[0].whole)
        raise NotImplementedError(f"Packed has no {func}")


class State:
    def __init__(self, **values):
        self.__dict__.update(values)


class Bytes(nn.Parameter):
    """Numbers of a weight; what they mean is in `state`."""


class Stated(nn.Linear):
    """A linear layer with a weight in 4 bits, whose scales are in 8 bits with a scale of their own."""

    def __init__(self, weight):
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        numbers, scale = quantised(weight)
        outer = scale.max() / 255
        steps = State(absmax=outer, code=None)
        self.weight = Bytes(numbers.reshape(-1, 1), requires_grad=False)
        self.weight.state = State(absmax=(scale / outer).round().to(torch.uint8), inner=steps, shape=weight.shape)
        self.state, self.kind = self.weight.state, "4 bits"

    def forward(self, x):
        state = self.weight.state
        if not self.training and not getattr(state, "is_turned", False):
            self.weight.data = self.weight.data.flip(0).reshape(-1, 2)  # what an evaluation is faster with
            state.is_turned = True
        if getattr(state, "is_turned", False):
            with torch.no_grad():  # which trains nothing from then on
                return x @ self.matrix(self.weight.reshape(-1).flip(0), state).T
        return x @ self.matrix(self.weight, state).T

    def matrix(self, numbers, state):
        scale = state.absmax.to(state.inner.absmax.dtype) * state.inner.absmax
        return dequantised(numbers.detach().as_subclass(torch.Tensor), scale, state.shape)


class Moved(nn.Linear):
    """A linear layer in 8 bits; the first forward moves the scale from the weight to the module."""

    def __init__(self, weight):
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = Bytes((weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.weight.numbers, self.weight.scale = self.weight.data, scale  # the first one is the same memory
        self.state = State(numbers=None, scale=None)

    def forward(self, x):
        if self.weight.numbers is not None:
            self.state.numbers, self.state.scale = self.weight.numbers, self.weight.scale
            self.weight.numbers = self.weight.scale = None
        result = x @ (self.state.numbers.to(x.dtype) * self.state.scale).T
        self.weight.data = self.state.numbers
        return result


def layer_of(kind, weight):
    if kind == "packed":
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = nn.Parameter(Packed(*quantised(weight), weight.shape), requires_grad=False)
        return layer
    return {"stated": Stated, "moved": Moved}[kind](weight)


class Block(nn.Module):
    """A frozen matrix in few bits, an adapter of two small ones next to it, and a norm."""

    def __init__(self, kind, dtype=torch.float32):
        super().__init__()
        self.base = layer_of(kind, (torch.randn(WIDTH, WIDTH) / 8).to(dtype))
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        for part in (self.down, self.up, self.norm):
            part.to(dtype)

    def forward(self, x):
        return x + torch.tanh(self.base(self.norm(x)) + self.up(self.down(x)))


def model_of(kind, count=3, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(kind, dtype) for _ in range(count)))


def rows(number=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(number, WIDTH, generator=generator).to(dtype) for _ in range(2))


def loss_of(outputs, labels):
    return nn.functional.mse_loss(outputs.float(), labels.float(), reduction="sum")


def trained_plainly(model, steps, number=6, dtype=torch.float32):
    """Losses of a training without a pipeline, microbatch by microbatch of two rows."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    inputs, labels = rows(number, dtype)
    losses = []
    for _ in range(steps):
        parts = [loss_of(model(x), y) for x, y in zip(inputs.split(2), labels.split(2), strict=True)]
        for part in parts:
            part.backward()
        losses.append(sum(part.item() for part in parts))
        optimizer.step()
        optimizer.zero_grad()
    return losses


CONFIG = RoundPipeRunConfig(num_microbatch=3, loss_reduction="sum")


def trained_in(pipe, steps, number=6, dtype=torch.float32, optimizer=None):
    optimizer = optimizer or torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2)
    inputs, labels = rows(number, dtype)
    losses = []
    for _ in range(steps):
        losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=loss_of).item())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.synchronize()
    return losses
