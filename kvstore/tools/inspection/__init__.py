"""`kvstore inspect`: look into a store that runs, on all its nodes at once.

In: a command line, and a store's handle, which asks the nodes.
Out: tables, or JSON; a node that does not answer in time is named.
Floor: of `tools`.
"""
