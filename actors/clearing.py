"""Clear a namespace on all nodes: choose the version, and have every store apply it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.actors.calls import actor_name, ask_all, what_is
from kvstore.actors.finding import actors_of
from kvstore.errors import InvalidRequest, KVStoreError, StaleVersion, StoreUnavailable

logger = logging.getLogger(__name__)

_CALL_S = 10.0
#: Each further try is for a node that could not be asked first, and that another caller cleared meanwhile.
_MAX_TRIES = 8


def clear_everywhere(
    namespace: bytes,
    stores: Mapping[str, Any],
    *directories: Any,
    name: str = "",
    stores_now: Callable[[], Mapping[str, Any]] = dict,
) -> int:
    """Clear a namespace under a later version than any that is known; raise as `Store.clear` says.

    Args:
        namespace: digest of the namespace.
        stores: handle of each node's store by node id.
        directories: the handles of the directory's shards; None for one that is away. They notify the stores that
            cannot be reached now.
        name: of the store; "" if none of its nodes is being restarted.
        stores_now: returns the stores that there are by then, as `stores` has them; those that began meanwhile are
            cleared, too.

    Returns:
        The number of cleared blocks.
    """
    cleared, shards = 0, {f"/{at}": each for at, each in enumerate(directories) if each is not None}
    for _ in range(_MAX_TRIES):
        version, asked = _next_version(namespace, stores, shards)
        if not asked & shards.keys():
            _check_not_between(name)
        methods = {node: handle.clear for node, handle in stores.items()}
        methods |= {key: handle.hear_clearing for key, handle in shards.items()}
        late, refused, has_heard = [], None, False
        for node, said in ask_all(methods, namespace, version, timeout_s=_CALL_S).items():
            if isinstance(said, StaleVersion):
                # A store that was asked has been cleared since, by another caller or through the directory.
                cleared += said.num_cleared
                late += [node] if node not in asked else []
                has_heard = has_heard or node in shards
            elif isinstance(said, InvalidRequest):
                refused = said  # It is reachable but did not clear, and will not be notified later.
            elif isinstance(said, KVStoreError):
                logger.warning("clear: the %s did not answer: %s", what_is(node), said)
            elif node in stores:
                cleared += int(said)
            else:
                has_heard = True
        if not has_heard:
            _check_not_between(name)
        if refused is not None:
            raise refused
        if not late:
            return cleared + _clear_later_ones(namespace, version, stores, stores_now)
    raise StaleVersion(f"wanted to clear nodes {late}, but others went on clearing them; try again")


def _clear_later_ones(
    namespace: bytes, version: int, stores: Mapping[str, Any], stores_now: Callable[[], Mapping[str, Any]]
) -> int:
    """Clear stores that began while the others were cleared; return how many blocks they had.

    Such a store may have asked the directory before that knew this clearing, and have the blocks of the node's last
    store. One that is not there yet will ask later.
    """
    cleared, known = 0, dict(stores)
    for _ in range(_MAX_TRIES):
        later = {node: handle for node, handle in stores_now().items() if handle != known.get(node)}
        if not later:
            break
        known |= later
        methods = {node: handle.clear for node, handle in later.items()}
        for node, said in ask_all(methods, namespace, version, timeout_s=_CALL_S).items():
            if isinstance(said, StaleVersion):  # It knows this clearing.
                cleared += said.num_cleared
            elif isinstance(said, InvalidRequest):
                raise said
            elif isinstance(said, KVStoreError):
                logger.warning("clear: the %s did not answer: %s", what_is(node), said)
            else:
                cleared += int(said)
    return cleared


def _check_not_between(name: str) -> None:
    """Refuse a clearing without the directory while a node's memory is between two of its stores.

    The next store of that node asks only the directory what was cleared.
    """
    if name and (between := [path for path in actors_of(name) if path.startswith(actor_name(name, "handover"))]):
        raise StoreUnavailable(
            f"wanted an answer of the directory, because {len(between)} nodes are between two stores, got none; clear "
            "again when it answers"
        )


def _next_version(namespace: bytes, stores: Mapping[str, Any], shards: Mapping[str, Any]) -> tuple[int, set[str]]:
    """Return (the version after the highest known one, the nodes and shards that answered).

    Each shard is told every clearing, by this module or by the stores, so one that answers is as good as all.
    """
    methods = {node: handle.version for node, handle in stores.items()}
    methods |= {key: handle.version for key, handle in shards.items()}
    said = ask_all(methods, namespace, timeout_s=_CALL_S)
    known = {node: int(answered) for node, answered in said.items() if not isinstance(answered, KVStoreError)}
    failed = {node: str(error) for node, error in said.items() if isinstance(error, KVStoreError)}
    if not known.keys() & stores.keys() or (not known.keys() & shards.keys() and failed.keys() & stores.keys()):
        raise StoreUnavailable(
            f"wanted the last clearing from the directory or all of {len(stores)} stores, got none from {failed}; "
            "clear again when they answer"
        )
    return max(known.values()) + 1, set(known)
