"""Search for the best configuration: prepare, propose, run trials, record them, repeat what is uncertain."""
