"""Manage the slots of a node: their blocks, and the rights of readers and writers.

In: chains, owners, deadlines.
Out: grants, tickets for writing, evictions; nothing here waits.
Floor: above memory, in the column of the store. One lock, in `pool`; all other modules here run under it.
"""
