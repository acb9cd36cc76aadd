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
    from kvstore.config import StoreConfig
    from kvstore.engine.layout import EngineLayout
    from kvstore.errors import KVStoreError

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
    "Store",
    "StoreConfig",
    "__version__",
    "connect",
    "errors",
    "node_store",
    "start",
]

_MODULE_OF = {
    "connect": "api",
    "node_store": "api",
    "start": "api",
    "Client": "client.client",
    "Store": "api",
    "StoreConfig": "config",
    "KVStoreError": "errors",
    "FetchResult": "client.results",
    "HandoffRoute": "client.results",
    "HandoffTicket": "blocks.ticket",
    "Publication": "client.results",
    "BlockHashes": "blocks.hashing",
    "Namespace": "blocks.hashing",
    "EngineLayout": "engine.layout",
    "Part": "blocks.part",
    "Lease": "client.lease",
    "BlockFailure": "client.results",
    "Job": "client.job",
    "LoadResult": "client.results",
    "Match": "client.results",
    "MissReason": "client.results",
    "Pinned": "client.results",
    "SaveResult": "client.results",
    "KVShape": "blocks.shape",
    "Planes": "blocks.shape",
    "SideTensor": "blocks.shape",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("kvstore.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvstore.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
