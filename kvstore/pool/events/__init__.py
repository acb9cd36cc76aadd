"""Note which blocks came and went until the reader of a pool takes that, with the root key of each block.

In: changes of findable blocks, and the root keys of claims.
Out: the changes in order, or that there were too many.
Floor: in the room of the pool, below its other modules.
"""
