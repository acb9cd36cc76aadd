"""Give a pool's blocks to the pool of the store's next life, which has the same memory.

In: a pool that grants nothing any more; or the image of one, and an empty pool of the same slots.
Out: an image: the readable blocks in the order of eviction, and the slots that old readers or writers may still use.
Floor: in the room of the pool, beside its other modules; `Pool.freeze` and `Pool.adopt` are the only callers.
"""
