"""Adapters of exported folders: their files, and those that are added later."""
