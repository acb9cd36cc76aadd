"""Exchange messages between processes: frames, messages, connections, and the server of a store.

In: bytes of a Unix or TCP socket, from workers, movers, peers and strangers.
Out: messages to a handler, answers to the callers, and the notification that a process has ended.
Floor: above blocks; it knows nothing of pools.
"""
