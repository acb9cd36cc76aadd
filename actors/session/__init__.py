"""This process and Ray: which one it joins or begins, which handles use it, and when it may end.

In: addresses, the environment, what runs on this machine. Out: a process that is connected to one Ray, or a typed
error; a Ray that ends with the last handle that needs it. Part of the floor of actors.
"""
