"""Processes of a job: how they find each other, exchange data, and detect that one has failed."""
