"""How processes talk: frames, messages, connections, and the server of a store.

In: bytes of a Unix or TCP socket, from workers, movers, peers and strangers.
Out: messages to a handler, answers to those who asked, and the news that a process has ended.
Floor: above blocks; it does not know what a pool is.
"""
