"""The cache that `generate` fills: its layers, and how all columns come out of it again."""
