"""Simplify a converted graph with onnxscript's passes, and try each rewrite rule where it can match.

``onnxscript.optimizer.optimize_ir`` tries each of its 47 rules at each node, and a rule of two outputs lists all nodes
of the graph every time it is tried: the time grows with the square of the number of layers. A rule matches only at an
operator of the type that its pattern ends in, so it is tried at those. The graph that results is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx_ir.passes import Sequential
    from onnxscript.rewriter import RewriteRule


def optimize_graph(model: ir.Model) -> None:
    """Fold constants, apply onnxscript's rewrite rules and fusions, and remove what is unused or computed twice."""
    # model: an `onnx_ir.Model`; it is changed in place
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter import onnx_fusions

    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", None)
    passes = None if rules is None else _passes([_RuleOfOperator(rule) for rule in rules])
    if passes is None:  # an onnxscript that is made of other parts
        optimizer.optimize(model)
    else:
        passes(model)
    onnx_fusions.fuse(model)


class _RuleOfOperator:
    """A rewrite rule that is tried at nodes of one operator."""

    # rule: an `onnxscript.rewriter.RewriteRule`

    def __init__(self, rule: RewriteRule) -> None:
        self._rule = rule
        operator = getattr(rule._matcher.pattern.output_nodes[0].op, "value", None)
        self._operator = operator() if callable(operator) else None  # None: a prefix, which several operators have

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> Any:
        """Return the replacement, ``None`` where the rule does not match."""
        if self._operator is not None and node.op_type != self._operator:
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


def _passes(rules: list[_RuleOfOperator]) -> Sequential | None:
    """The passes of ``optimize_ir``, in its order; ``None`` where onnxscript has other parts."""
    try:
        import onnx_ir.passes as infra
        import onnx_ir.passes.common as common
        from onnxscript.rewriter import RewritePass, pattern

        from ....private_names.of_onnxscript import constant_folding as folding

        fold = folding.FoldConstantsPass(
            shape_inference=True,
            input_size_limit=folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
            output_size_limit=folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
        )
        simplify = [
            fold,
            RewritePass(pattern.RewriteRuleSet(rules)),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
        ]
        return infra.Sequential(
            common.InlinePass(),
            infra.PassManager(simplify, steps=2, early_stop=True),
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            common.OutputFixPass(),
            common.NameFixPass(),
        )
    except (ImportError, AttributeError, TypeError):
        return None
