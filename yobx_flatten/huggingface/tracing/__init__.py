"""Replace functions of transformers, while a model is traced, by functions without branches."""
