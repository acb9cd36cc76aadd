"""The measurements of `kvstore bench` on a cluster.

In: sizes, counts and a running Ray.
Out: rows of figures.
Floor: above all but the command line, which alone imports it.
"""
