"""Keep blocks on this node's disk, beyond its memory and beyond the life of its store.

In: blocks that became readable in memory, chains that loads miss. Out: blocks in slots of memory, counts.
Floor: on `pool`, below `mover`. Nothing here waits on the control thread.
"""
