"""A stock ``Trainer`` run against what a study promised."""
