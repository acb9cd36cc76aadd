"""SGLang's UnifiedRadixCache without an engine, for benchmarks/paged.py: on a CPU, with its own test kit's settings.

Packages that only a GPU or images need may be missing: they are replaced by modules without content.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from array import array
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_UNNEEDED = {"sgl_kernel", "torchvision", "datasets"}


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] in _UNNEEDED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, _: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

        module.__getattr__ = attribute


class Sglang:
    """A UnifiedRadixCache with one of its tree cores."""

    def __init__(self, core: str, page_size: int, num_tokens: int) -> None:
        import torch
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.test.kits.unified_radix_cache.config import CacheConfig
        from sglang.test.kits.unified_radix_cache.fixtures import build_fixture

        config = CacheConfig(
            page_size=page_size, num_layers=1, full_attention_layer_ids=(0,), head_num=1, head_dim=1,
            kv_size=num_tokens, max_context_len=64,
        )  # fmt: skip
        made, self._allocator, _ = build_fixture(config, tree_core_backend="python")
        params = made.cache_init_params
        if page_size > 1:
            self._allocator = PagedTokenToKVPoolAllocator(
                num_tokens, page_size=page_size, dtype=config.dtype, device="cpu",
                kvcache=self._allocator.get_kvcache(), need_sort=False,
            )  # fmt: skip
            params.token_to_kv_pool_allocator = self._allocator
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):
            self._cache = UnifiedRadixCache(params=params)
        if self._cache._tree_core_backend != core:
            raise ImportError(f"the tree core {core} is not available")
        torch.set_num_threads(1)  # Small tensors: more threads only wait for each other.
        self._torch = torch
        self.name = f"sglang {core}"
        self._key, self._insert, self._match, self._evict = RadixKey, InsertParams, MatchPrefixParams, EvictParams

    def encode(self, tokens: list[int]) -> Any:
        return array("q", tokens)

    def insert(self, key: Any) -> None:
        # As a scheduler does: slots for what the tree lacks, and the tree's own slots before them.
        found = self._cache.match_prefix(self._match(key=self._key(key)))
        new = self._allocator.alloc(len(key) - found.device_prefix_len)
        if found.device_prefix_len:
            new = self._torch.cat((self._cache.path_device_indices(found.last_device_node), new))
        self._cache.insert(self._insert(key=self._key(key), value=new, prev_prefix_len=found.device_prefix_len))

    def match_lock(self, key: Any) -> tuple[Any, int]:
        found = self._cache.match_prefix(self._match(key=self._key(key)))
        lock = self._cache.lock(found.last_device_node)
        return lock, len(self._cache.path_device_indices(found.last_device_node))

    def unlock(self, handle: Any) -> None:
        self._cache.unlock(handle)

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(self._evict(num_tokens=num_tokens))


def make_all(page_size: int, num_tokens: int) -> list[Any]:
    """Return a cache with each tree core of SGLang that can be loaded.

    Raises:
        ImportError: SGLang, or something that it needs, cannot be imported.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("sglang is not installed")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not any(isinstance(finder, _Empty) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Empty())
    found = [Sglang("python", page_size, num_tokens)]
    try:
        found.append(Sglang("rust", page_size, num_tokens))
    except (ImportError, OSError, RuntimeError) as error:
        print(f"without the rust tree core: {error}", file=sys.stderr)
    return found
