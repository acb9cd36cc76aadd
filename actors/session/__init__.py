"""This process and Ray: the Ray that it joins or begins, the handles that use it, and its end.

In: addresses, the environment, what runs on this machine. Out: a process that is connected to one Ray, or a typed
error; a Ray that ends with the last handle that needs it. Part of the floor of actors.
"""
