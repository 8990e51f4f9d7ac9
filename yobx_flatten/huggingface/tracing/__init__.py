"""Replace functions of transformers by versions without branches, during a trace."""
