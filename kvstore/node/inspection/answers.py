"""Check a question of `kvstore inspect`, and answer it. Any thread may call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.blocks.chain import BlockHashes
from kvstore.bounds import MAX_CHAIN_BYTES, check_count, check_digest, check_text, clip
from kvstore.errors import InvalidRequest
from kvstore.node.core import NodeCore
from kvstore.node.inspection.blocks import chain, leases, namespaces, path
from kvstore.node.inspection.handoffs import handoffs

#: The most rows of one answer.
MOST_ROWS = 10_000
_PREFIX = re.compile("[0-9a-f]{0,64}")
#: Hashes of one question for a path; more are not needed, since the last one names its whole chain.
_MOST_HASHES = 4096


def answer(core: NodeCore, what: str, options: Mapping[str, Any]) -> Any:
    """Return what this node has to say.

    Args:
        core: the node store.
        what: "namespaces", "path", "chain", "leases" or "handoffs".
        options: of the question: "limit", and "prefix", "hashes", "chain" or "lease_id".

    Raises:
        InvalidRequest: there is no such question, or an option is wrong.
    """
    if (find := _QUESTIONS.get(what)) is None:
        raise InvalidRequest(f"what: wanted one of {', '.join(_QUESTIONS)}, got {clip(what)}")
    return find(core, options)


def _namespaces(core: NodeCore, options: Mapping[str, Any]) -> Any:
    prefix = check_text("prefix", options.get("prefix", ""))
    if not _PREFIX.fullmatch(prefix):
        raise InvalidRequest(f"prefix: wanted up to 64 digits in hexadecimal, got {clip(prefix)}")
    return namespaces(core.state, prefix, _limit(options))


def _path(core: NodeCore, options: Mapping[str, Any]) -> Any:
    hashes = options.get("hashes")
    if not isinstance(hashes, list) or not 0 < len(hashes) <= _MOST_HASHES:
        raise InvalidRequest(f"hashes: wanted a list of 1 to {_MOST_HASHES} hashes of blocks, got {clip(hashes)}")
    return path(core.state, [check_digest("hash", each) for each in hashes])


def _chain(core: NodeCore, options: Mapping[str, Any]) -> Any:
    wanted = options.get("chain")
    if not isinstance(wanted, BlockHashes) or len(wanted.data) > MAX_CHAIN_BYTES:
        raise InvalidRequest(f"chain: wanted BlockHashes of at most {MAX_CHAIN_BYTES} bytes, got {clip(wanted)}")
    return chain(core.state, wanted, _limit(options))


def _leases(core: NodeCore, options: Mapping[str, Any]) -> Any:
    lease_id = options.get("lease_id")
    if lease_id is not None:
        check_count("lease_id", lease_id, 1, (1 << 64) - 1)
    return leases(core.state, core.control.server, lease_id, _limit(options))


def _handoffs(core: NodeCore, options: Mapping[str, Any]) -> Any:
    return handoffs(core.state, core.control.handoffs, core.control.server, _limit(options))


def _limit(options: Mapping[str, Any]) -> int:
    return check_count("limit", options.get("limit", MOST_ROWS), 1, MOST_ROWS)


_QUESTIONS: dict[str, Callable[[NodeCore, Mapping[str, Any]], Any]] = {
    "namespaces": _namespaces, "path": _path, "chain": _chain, "leases": _leases, "handoffs": _handoffs,
}  # fmt: skip
