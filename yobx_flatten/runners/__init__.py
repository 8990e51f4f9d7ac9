"""Open exported files in a runtime, and call them: inputs and outputs are passed by name."""
