"""Train one model on several ranks, each with different rows of the batch."""
