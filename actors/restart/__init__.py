"""Restart a store's nodes one after the other, and keep their memory (docs/adr/0039-warm-restarts.md)."""
