"""The side of the connector that runs beside vLLM's scheduler: what is asked of the store, and what workers are to do.

In: vLLM's requests and what it has computed of them.
Out: how much of a prompt need not be computed, and a plan for each step.
Floor: above what both sides share; the two sides never import each other.
"""
