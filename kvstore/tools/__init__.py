"""Tools for a person at a machine: the doctor, lanes, provenance, tables, options of the command line.

In: a command line.
Out: findings with their remedies.
Floor: above mover, which the probe runs.
"""
