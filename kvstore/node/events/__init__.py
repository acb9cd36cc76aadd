"""Events of one node store for subscribers outside the cluster, in vLLM's schema: which blocks are here.

In: the changes of the pools of memory and disk.
Out: batches over ZeroMQ, numbered, and again for those that missed some; from a process of its own.
Floor: of `node`; docs/events.md is for those who subscribe.
"""
