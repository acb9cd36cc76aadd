"""Adapters between the store and serving frameworks. Each imports its framework, and nothing else of kvstore does."""
