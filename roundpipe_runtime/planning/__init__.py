"""What a training will need, told before anything is allocated: memory, transfers, the time of a step."""
