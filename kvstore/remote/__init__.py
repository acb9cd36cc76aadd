"""Find blocks of other nodes, lease them there, and fetch them for a load.

In: the chain that a load misses.
Out: blocks in the pool of this node, each checked against its lease and its version; the directory, and the stores'
    announcements to it.
Floor: above mover and pool, in the column of the store.
"""
