"""Classes written once for torch, optree and JAX: those of the lesson on custom pytree nodes, and a few more.

A process that loads a saved program imports this module for them, and no framework but torch comes along.
"""

from dataclasses import dataclass
from typing import Any

from yobx_flatten import register_pytree_node, register_pytree_node_class, register_pytree_with_keys, static_field
from yobx_flatten.declare import pytree_dataclass

# Way 1: methods.


@register_pytree_node_class
@dataclass
class TrainState:
    params: dict
    opt_state: dict
    step: int

    def tree_flatten(self):
        children = (self.params, self.opt_state, self.step)
        aux_data = None
        return children, aux_data

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        return cls(*children)


@register_pytree_node_class
@dataclass
class FixedShape:
    data: Any
    shape_info: tuple

    def tree_flatten(self):
        return (self.data,), self.shape_info

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux)


# Way 2: functions.


class MyState:
    def __init__(self, x, y):
        self.x = x
        self.y = y


def state_flatten(s):
    return (s.x, s.y), None


def state_unflatten(aux, children):
    return MyState(*children)


register_pytree_node(MyState, state_flatten, state_unflatten)


class LinearParams:
    """A simple container for linear layer parameters."""

    def __init__(self, weights, bias):
        self.weights = weights
        self.bias = bias


def linear_flatten(obj):
    """Returns (children, aux_data)."""
    children = (obj.weights, obj.bias)
    aux_data = None
    return children, aux_data


def linear_unflatten(aux_data, children):
    """Reconstructs the object from (aux_data, children)."""
    weights, bias = children
    return LinearParams(weights, bias)


register_pytree_node(LinearParams, linear_flatten, linear_unflatten)


class DenseParams:
    def __init__(self, weights, bias, activation="relu"):
        self.weights = weights
        self.bias = bias
        self.activation = activation


def dense_flatten(obj):
    children = (obj.weights, obj.bias)
    aux_data = obj.activation
    return children, aux_data


def dense_unflatten(aux_data, children):
    weights, bias = children
    return DenseParams(weights, bias, activation=aux_data)


register_pytree_node(DenseParams, dense_flatten, dense_unflatten)


# Way 3: the fields say it.


@pytree_dataclass
class FieldState:
    params: dict
    opt_state: dict
    step: int


@pytree_dataclass(frozen=True, slots=True)
class Dense:
    weights: Any
    bias: Any
    activation: str = static_field(default="relu")


# With keys.


class Keyed:
    def __init__(self, first, second):
        self.first = first
        self.second = second


class DictKey:
    """As the one of `jax.tree_util`: what counts is the attribute."""

    def __init__(self, key):
        self.key = key


register_pytree_with_keys(
    Keyed,
    lambda obj: (((DictKey("first"), obj.first), (DictKey("second"), obj.second)), None),
    lambda aux, children: Keyed(*children),
)
