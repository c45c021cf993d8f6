"""Load the user's dataset and prepare its batches for trials."""
