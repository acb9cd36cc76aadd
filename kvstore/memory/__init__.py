"""Manage the shared memory of a node: the arena, and tables that workers read.

In: sizes and file descriptors.
Out: mapped memory, in a store, its mover and its workers; counters of the chains in the store.
Floor: above rpc. Both columns use it.
"""
