"""A prefix-cached `generate` for Hugging Face decoder models.

    store = kvstore.start("1GiB")
    cached = PrefixCachedModel(model, store)
    cached.generate(input_ids, max_new_tokens=32)

docs/transformers.md says what it promises.
"""

from __future__ import annotations

from kvstore.integrations.transformers.prefix_cached import PrefixCachedModel
from kvstore.integrations.transformers.stats import PrefixCacheStats

__all__ = ["PrefixCacheStats", "PrefixCachedModel"]
