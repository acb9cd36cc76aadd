"""The shared memory of a node: the arena, and tables that workers read.

In: sizes and file descriptors.
Out: mapped memory, in a store, its mover and its workers; counters of what is there.
Floor: above rpc. Both columns use it.
"""
