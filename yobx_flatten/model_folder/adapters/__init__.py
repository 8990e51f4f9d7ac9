"""Adapters of exported folders: read them, and add more later."""
