"""The connector's half in vLLM's workers: it copies between their caches and the store.

In: plans of the scheduler's side, and vLLM's cache tensors.
Out: what was loaded, saved and published, block by block.
Floor: above the modules that both sides share; the two sides never import each other.
"""
