"""Offer searches to others: an HTTP API with a queue, what runs its jobs, and a page."""
