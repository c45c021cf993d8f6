"""Train with stock code, to check what a search promised."""
