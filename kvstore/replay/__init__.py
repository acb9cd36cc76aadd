"""What `kvstore replay` and `kvstore trace make` do: requests of a trace against the pool, without bytes and Ray.

In: a file of requests, sizes of a cache, names of policies.
Out: rows of figures, a table, a plot; or a made trace.
Floor: above the benchmarks, below the command line, which alone imports this.
"""
