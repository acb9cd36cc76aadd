"""raykv: a distributed KV-cache store for LLM serving on Ray.

Names are loaded on first use, so that importing this package needs neither Ray nor torch nor NIXL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore import errors as errors
    from kvstore.api import Store as Store
    from kvstore.api import connect, node_store, start
    from kvstore.blocks.hashing import BlockHashes, Namespace
    from kvstore.blocks.part import Part
    from kvstore.blocks.priority import Priority
    from kvstore.blocks.shape import KVShape, Planes, SideTensor
    from kvstore.blocks.ticket import HandoffTicket
    from kvstore.client.client import Client
    from kvstore.client.job import Job
    from kvstore.client.lease import Lease
    from kvstore.client.results import (
        BlockFailure,
        FetchResult,
        HandoffRoute,
        LoadResult,
        Match,
        MissReason,
        Pinned,
        Publication,
        SaveResult,
    )
    from kvstore.client.routing import NodeLoad, NodeRank, rank_nodes
    from kvstore.config import StoreConfig
    from kvstore.engine.layout import EngineLayout
    from kvstore.errors import KVStoreError
    from kvstore.paged.allocator import PageAllocator
    from kvstore.paged.cache import PagedPrefixCache
    from kvstore.paged.groups import PageGroup
    from kvstore.quotas import TenantQuota

__version__ = "0.1.0"

__all__ = [
    "BlockFailure",
    "BlockHashes",
    "Client",
    "EngineLayout",
    "FetchResult",
    "HandoffRoute",
    "HandoffTicket",
    "Job",
    "KVShape",
    "KVStoreError",
    "Lease",
    "LoadResult",
    "Match",
    "MissReason",
    "Namespace",
    "NodeLoad",
    "NodeRank",
    "PageAllocator",
    "PageGroup",
    "PagedPrefixCache",
    "Part",
    "Pinned",
    "Planes",
    "Priority",
    "Publication",
    "SaveResult",
    "SideTensor",
    "Store",
    "StoreConfig",
    "TenantQuota",
    "__version__",
    "connect",
    "errors",
    "node_store",
    "rank_nodes",
    "start",
]

_NAMES_IN = {
    "api": ("Store", "connect", "node_store", "start"),
    "blocks.hashing": ("BlockHashes", "Namespace"),
    "blocks.part": ("Part",),
    "blocks.priority": ("Priority",),
    "blocks.shape": ("KVShape", "Planes", "SideTensor"),
    "blocks.ticket": ("HandoffTicket",),
    "client.client": ("Client",),
    "client.job": ("Job",),
    "client.lease": ("Lease",),
    "client.results": (
        "BlockFailure", "FetchResult", "HandoffRoute", "LoadResult", "Match", "MissReason", "Pinned", "Publication",
        "SaveResult",
    ),
    "client.routing": ("NodeLoad", "NodeRank", "rank_nodes"),
    "config": ("StoreConfig",),
    "engine.layout": ("EngineLayout",),
    "errors": ("KVStoreError",),
    "paged.allocator": ("PageAllocator",),
    "paged.cache": ("PagedPrefixCache",),
    "paged.groups": ("PageGroup",),
    "quotas": ("TenantQuota",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("kvstore.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvstore.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
