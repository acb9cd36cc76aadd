"""Keep blocks on this node's disk, beyond its memory and beyond the life of its store.

In: blocks that became readable in memory, and chains that loads miss; never the control thread, where it would wait.
Out: blocks in slots of memory, checked; and counts.
Floor: `pool` is below; `mover` and all that asks for blocks is above.
"""
