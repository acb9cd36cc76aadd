"""Run transformers models with their KV in pages; needs transformers.

`PagedKVCache` has the tensors and the index of their pages, `PagedRunner` computes with them, and `PagedStore` brings
pages from a store or a hand-off, and saves them. An engine of these three is in examples/demo_engine.py.
"""

from kvstore.integrations.transformers.paged.kv_cache import PagedKVCache
from kvstore.integrations.transformers.paged.runner import PagedRunner
from kvstore.integrations.transformers.paged.store import BroughtTokens, PagedStore, PagedTicket, wait_saved

__all__ = ["BroughtTokens", "PagedKVCache", "PagedRunner", "PagedStore", "PagedTicket", "wait_saved"]
