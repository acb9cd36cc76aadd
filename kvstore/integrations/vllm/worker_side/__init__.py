"""The side of the connector that runs in vLLM's workers: copies between their caches and the store.

In: plans of the scheduler's side, and vLLM's cache tensors.
Out: what was loaded, saved and published, block by block.
Floor: above what both sides share; the two sides never import each other.
"""
