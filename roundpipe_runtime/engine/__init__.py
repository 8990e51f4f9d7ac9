"""The execution engine: a run from its inputs to the commit of its gradients."""
