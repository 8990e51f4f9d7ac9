"""Tests for a device: ``pytest -m gpu`` on a GPU, and on accelerators and virtual devices that are made of the CPU."""
