"""Read the data of a training: text or conversations, as rows of tokens."""
