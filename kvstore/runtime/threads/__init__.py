"""Run functions on threads that are not the caller's.

In: functions.
Out: their results, in futures; threads that grow with the work and end without it.
Floor: that of kvstore.runtime.
"""
