"""Decide which blocks of a full pool go first: by their last touch, or by what is learned of their reuse.

In: which slots are claimed, touched, evicted and freed, and the hashes of their blocks.
Out: slots in the order of eviction. The pool alone knows which of them can go.
Floor: in the room of the pool, below its other modules.
"""
