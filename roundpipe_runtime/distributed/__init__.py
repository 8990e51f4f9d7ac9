"""Train with several processes, on ``torch.distributed`` as it is."""
