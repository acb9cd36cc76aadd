"""Provide time, threads, checks for forks, and a loop that waits for sockets.

In: functions to run, times and descriptors to wait for, the process id in which an object was made.
Out: results of the functions, calls when it is time, and errors in a forked child.
Floor: above the errors and settings at the root; it knows nothing of blocks or messages.
"""
