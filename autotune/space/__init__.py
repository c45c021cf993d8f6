"""Define the search space: arms, per-device batches, and their translation to ``TrainingArguments``."""
