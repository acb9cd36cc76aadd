"""NIXL and the process that owns it: READs from other nodes into slots.

In: the store's requests for READs.
Out: bytes in slots, and for each READ its progress, how it ended, or that its end is not known yet.
Floor: above rpc and memory, in the column of the store. Only `nixl` imports NIXL.
"""
