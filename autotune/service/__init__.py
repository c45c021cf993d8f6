"""Offer searches to others: an HTTP API with a queue, agents that run what is queued, and a page."""
