"""Define a block: its shape, hash and part, and the numbers of its slots.

In: tokens, shapes, ranks.
Out: hashes, chains, grants, tickets, and how a READ of many blocks is divided into chunks.
Floor: above kernels and runtime. Both columns, worker and store, read these types, which only describe.
"""
