"""Time, threads and forks, and a loop that waits for sockets.

In: functions to run, times and descriptors to wait for, the process id that somebody began with.
Out: their results, calls when it is time, and errors in a forked child.
Floor: above the errors and settings at the root; it knows nothing of blocks or messages.
"""
