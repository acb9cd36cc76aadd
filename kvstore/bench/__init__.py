"""What `kvstore bench gpu` measures, in one process and without Ray.

In: sizes and ways.
Out: rows of figures.
Floor: above all but the command line. What needs a cluster is in kvstore.actors.bench, which alone imports it beside
    the command line.
"""
