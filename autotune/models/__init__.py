"""From a model's name to its config: the built-in catalog, local folders, the Hugging Face hub."""
