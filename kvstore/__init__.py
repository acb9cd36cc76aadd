"""raykv: a distributed KV-cache store for LLM serving on Ray.

Names are loaded on first use, so that importing this package needs neither Ray nor torch nor NIXL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.api import connect, node_store, start
    from kvstore.client import Client
    from kvstore.config import StoreConfig
    from kvstore.errors import KVStoreError
    from kvstore.handoff import HandoffTicket
    from kvstore.hashing import BlockHashes, Namespace
    from kvstore.layout import EngineLayout
    from kvstore.lease import Lease
    from kvstore.part import Part
    from kvstore.results import (
        BlockFailure,
        FetchResult,
        HandoffRoute,
        Job,
        LoadResult,
        Match,
        MissReason,
        Pinned,
        Publication,
        SaveResult,
    )
    from kvstore.shape import KVShape, Planes, SideTensor

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
    "Part",
    "Pinned",
    "Planes",
    "Publication",
    "SaveResult",
    "SideTensor",
    "StoreConfig",
    "__version__",
    "connect",
    "node_store",
    "start",
]

_MODULE_OF = {
    "connect": "api",
    "node_store": "api",
    "start": "api",
    "Client": "client",
    "StoreConfig": "config",
    "KVStoreError": "errors",
    "FetchResult": "results",
    "HandoffRoute": "results",
    "HandoffTicket": "handoff",
    "Publication": "results",
    "BlockHashes": "hashing",
    "Namespace": "hashing",
    "EngineLayout": "layout",
    "Part": "part",
    "Lease": "lease",
    "BlockFailure": "results",
    "Job": "results",
    "LoadResult": "results",
    "Match": "results",
    "MissReason": "results",
    "Pinned": "results",
    "SaveResult": "results",
    "KVShape": "shape",
    "Planes": "shape",
    "SideTensor": "shape",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvstore.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
