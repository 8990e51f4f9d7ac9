"""Replay what was exported next to the eager module, and report what differs."""
