"""NIXL and the process that owns it: READs from other nodes into slots.

In: READs that the store asks for.
Out: bytes in slots, and for each READ how far it is, how it ended, or that nobody knows yet.
Floor: above rpc and memory, in the column of the store. `nixl` is the one importer of NIXL.
"""
