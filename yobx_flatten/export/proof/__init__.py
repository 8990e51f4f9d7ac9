"""Run exported programs and files on the inputs of the eager module, and report differences of the outputs."""
