"""The classes of RoundPipe's page on custom data types, registered as it registers them: where they are defined."""

from dataclasses import dataclass

import torch
from torch.utils._pytree import register_pytree_node


class ModelOutput:
    """The page's first example: nobody registers it."""

    def __init__(self, logits, hidden_states):
        self.logits = logits
        self.hidden_states = hidden_states


@dataclass
class TransformerOutput:
    logits: torch.Tensor
    hidden_states: torch.Tensor
    loss: float = 0.0


def flatten_transformer_output(obj):
    return [obj.logits, obj.hidden_states], {"loss": obj.loss}


def unflatten_transformer_output(children, context):
    logits, hidden_states = children
    return TransformerOutput(logits=logits, hidden_states=hidden_states, loss=context["loss"])


register_pytree_node(TransformerOutput, flatten_transformer_output, unflatten_transformer_output)


class FlexibleOutput:
    def __init__(self, logits, attentions=None):
        self.logits = logits
        self.attentions = attentions


def flatten_flexible(obj):
    children = [obj.logits]
    has_attentions = obj.attentions is not None
    if has_attentions:
        children.append(obj.attentions)
    return children, {"has_attentions": has_attentions}


def unflatten_flexible(children, context):
    if context["has_attentions"]:
        logits, attentions = children
    else:
        logits = children[0]
        attentions = None
    return FlexibleOutput(logits=logits, attentions=attentions)


register_pytree_node(FlexibleOutput, flatten_flexible, unflatten_flexible)


class BatchResult:
    def __init__(self, outputs: list, metadata: dict):
        self.outputs = outputs
        self.metadata = metadata


def flatten_batch_result(obj):
    return [obj.outputs, obj.metadata], None


def unflatten_batch_result(children, context):
    outputs, metadata = children
    return BatchResult(outputs=outputs, metadata=metadata)


register_pytree_node(BatchResult, flatten_batch_result, unflatten_batch_result)
