"""Routers without a cluster: replicas that say how long their queues are, and requests."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not in this environment; `make test-serve` has it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray Serve's own modules
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from kvstore.integrations.serve import router as module
from kvstore import KVShape, Namespace
from kvstore.integrations.space_text import space_to_text

DEPLOYMENT = DeploymentID(name="Model", app_name="app")
SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_size=4)
SPACE = Namespace(model="a model", shape=SHAPE)
#: Text of ten blocks, with one token for each character.
TEXT = "0123456789" * 4
_numbers = itertools.count()


class Replica:
    """A replica of a deployment, as a router sees it."""

    max_ongoing_requests = 10
    multiplexed_model_ids = frozenset()
    availability_zone = None

    def __init__(self, name, node_id, queue_len=0):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.node_id, self.queue_len = node_id, queue_len

    async def get_queue_len(self, *, deadline_s):
        return self.queue_len


def tokenizer(text, add_special_tokens=True):
    return {"input_ids": list(map(ord, text))}


def make_router(replicas, locate=None, learned=None, read_tokens=tokenizer, **kwargs):
    """Return a router of some replicas, whose queue lengths it knows; call it in an event loop.

    `locate` answers for the store, `learned` is what the replicas say of themselves, and `read_tokens` the tokenizer.

    Not monkeypatched: Ray Serve pickles a router's class by value, and loading that changes the class in this process.
    """

    class Router(module.PrefixRouter):
        def _load_tokenizer(self):
            return read_tokens

        def _open_source(self):
            return super()._open_source() if locate is None else SimpleNamespace(locate=locate)

        def _ask_replicas(self):
            return learned

    router = Router(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    kwargs = {"tokenizer": "letters", "store": None if locate is None else "default", **kwargs}
    router.initialize_state(**{"space": space_to_text(SPACE), **kwargs})
    router.update_replicas(replicas)
    for each in replicas:
        router.on_new_queue_len_info(each.replica_id, each.queue_len)
    return router


def ask(prompt=TEXT, **fields):
    """Return a request that waits to be routed."""
    number = next(_numbers)
    metadata = RequestMetadata(request_id=f"r{number}", internal_request_id=f"i{number}")
    return PendingRequest(args=[SimpleNamespace(prompt=prompt, **fields), None], kwargs={}, metadata=metadata)


def names(ranks):
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]
