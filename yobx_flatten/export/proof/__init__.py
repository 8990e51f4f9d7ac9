"""Run exported programs and files next to the eager module, and report differences."""
