"""What a block is: its shape, hash and part, and the numbers of slots.

In: tokens, shapes, ranks.
Out: hashes, chains, grants, tickets, and how many blocks are divided into chunks.
Floor: above kernels and runtime. Both columns, worker and store, read these types; none of them does anything.
"""
