"""Connect the processes of a training job, exchange data between them, and detect failed processes."""
