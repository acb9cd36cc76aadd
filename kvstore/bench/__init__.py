"""The measurements of `kvstore bench gpu` and `kvstore bench disk`, in one process and without Ray.

In: sizes and ways.
Out: rows of figures.
Floor: above all but the command line. Measurements that need a cluster are in kvstore.actors.bench; only that and the
    command line import this.
"""
