"""Processes of a job: how they find each other, exchange, and notice that one has failed."""
