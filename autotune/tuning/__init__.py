"""The search: prepare, propose, run, record, repeat."""
