"""Hand a node's arena from one life of its store to the next (docs/adr/0039-warm-restarts.md).

In: a store that ends, with its arena, its pool and the processes that may still use slots.
Out: the same for the next store of the node; or nothing, and why, and that store begins empty.
Floor: of `node`, below `core`, which begins with an `OldLife`; `giving` is above it.
"""
