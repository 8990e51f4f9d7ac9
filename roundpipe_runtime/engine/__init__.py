"""The execution engine: execute a run, from its inputs to the commit of its gradients."""
