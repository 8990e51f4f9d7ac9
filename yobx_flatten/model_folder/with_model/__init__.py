"""An exported folder next to the model that it was exported from."""
