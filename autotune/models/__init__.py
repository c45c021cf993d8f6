"""Resolve the name of a model or dataset to what it is: built-in catalog, local files, the Hugging Face hub."""
