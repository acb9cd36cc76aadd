"""The node store: everything that one node keeps, and what it answers to whom.

In: messages of workers, movers and peers, calls of the Ray actor.
Out: their answers; a fence that kills a mover which cannot be trusted with slots any more.
Floor: the highest in the column of the store.
"""
