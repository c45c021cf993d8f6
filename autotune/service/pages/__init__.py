"""Serve the pages that a browser shows: rendered here, kept current by events, with nothing from another host."""
