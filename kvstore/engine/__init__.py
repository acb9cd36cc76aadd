"""An engine's cache: its layout, and the copies between it and slots.

In: an engine's tensors, ids of its blocks, slots.
Out: bytes in the arena, in the cache, or in a stage on the GPU.
Floor: above memory, in the column of the worker.
"""
