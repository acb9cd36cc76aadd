"""The store's side of hand-offs: blocks that are published, claimed and fetched.

In: tickets of publishers, fetches of clients, claims of peers.
Out: slots with the blocks, once, or a reason.
Floor: above remote, in the column of the store.
"""
