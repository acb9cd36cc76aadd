"""Write blocks of memory to the disk: which of them, in which order, and behind what.

In: blocks that became readable or are about to be evicted, and the pools of memory and of the disk.
Out: blocks that can be found on the disk; and counts of those that were left out, by reason.
Floor: in the room of the disk, below its tier.
"""
