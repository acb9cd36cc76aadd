"""Blocks of other nodes: who has them, leases there, and fetching them for a load.

In: the chain that a load misses.
Out: blocks in the pool of this node, each checked against its lease and its version; the directory, and what stores
    tell it.
Floor: above mover and pool, in the column of the store.
"""
