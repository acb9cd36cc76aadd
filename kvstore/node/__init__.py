"""The node store. It keeps what one node has, and answers workers, movers and peers.

In: messages of workers, movers and peers, calls of the Ray actor.
Out: their answers; a fence that kills a mover that can no longer be trusted with slots.
Floor: the highest in the column of the store.
"""
