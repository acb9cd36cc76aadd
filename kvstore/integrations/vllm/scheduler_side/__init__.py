"""The connector's half beside vLLM's scheduler: it asks the store, and plans the workers' steps.

In: vLLM's requests, and how much of them is computed.
Out: how much of a prompt need not be computed, and a plan for each step.
Floor: above the modules that both sides share; the two sides never import each other.
"""
