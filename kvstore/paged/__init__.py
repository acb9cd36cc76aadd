"""Pages of an engine's own cache, shared by requests with equal prefixes. Index only: no bytes are here.

In: tokens, numbers of tokens, page ids.
Out: page ids and token slots of requests, copies that the caller has to make, pages to reuse.
Floor: above blocks, in the column of the worker. It knows no store, and an engine needs no store to use it.
"""
