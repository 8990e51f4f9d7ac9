"""Trace a module to a program."""
