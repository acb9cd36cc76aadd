"""What a worker process uses: save, load, publish, fetch, and the results of these.

In: hashes, tickets, ids of the engine's blocks.
Out: jobs and their results.
Floor: the highest in the column of the worker. Nothing here imports the store's column; both meet in messages.
"""
