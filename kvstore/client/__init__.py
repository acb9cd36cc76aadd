"""The worker process's API: save, load, publish, fetch, and their results.

In: hashes, tickets, ids of the engine's blocks.
Out: jobs and their results.
Floor: the highest in the column of the worker. Nothing here imports the store's column; both meet in messages.
"""
