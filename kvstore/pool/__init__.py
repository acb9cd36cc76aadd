"""Manage the slots of a node: the block in each slot, and the rights of its readers and writers.

In: chains, owners, deadlines.
Out: grants, tickets for writing, evictions; nothing here waits.
Floor: above memory, in the column of the store. One lock, in `pool`; all other modules here run under it.
"""
