"""Record the calls of a running model, and read an export's example and dynamic shapes off them."""
