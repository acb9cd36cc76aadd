"""Slots and rights: which block lies where, and who may read or write it.

In: chains, owners, deadlines.
Out: grants, tickets for writing, evictions; nothing that waits.
Floor: above memory, in the column of the store. One lock, in `pool`; all other modules here run under it.
"""
