"""What the caller of a restart gives: ids of nodes, and a function that hears of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.bounds import check_node_id, clip
from kvstore.errors import InvalidRequest

logger = logging.getLogger(__name__)


def unfailing(on_step: Callable[[str, str], object]) -> Callable[[str, str], None]:
    """Return a function that calls another one, until that raises."""
    is_over = False

    def say(node_id: str, what: str) -> None:
        nonlocal is_over
        if is_over:
            return
        try:
            on_step(node_id, what)
        except Exception:
            is_over = True
            logger.warning("on_step raised, and is not called again; the restart goes on", exc_info=True)

    return say


def named(node_ids: Sequence[str], alive: list[str]) -> list[str]:
    """Return the nodes with these ids, or with ids that begin so, each once."""
    if isinstance(node_ids, str | bytes) or not isinstance(node_ids, Iterable):
        raise InvalidRequest(f"node_ids: wanted a list of nodes' ids, or None for all, got {clip(node_ids)}")
    wanted = list[str]()
    for text in (check_node_id("node_ids", each) for each in node_ids):
        found = [text] if text in alive else [node_id for node_id in alive if node_id.startswith(text)]
        if len(found) != 1:
            which = "several nodes' ids begin" if found else "no node's id begins"
            raise InvalidRequest(f"node_ids: {which} with {text!r}; nodes: {', '.join(found or alive)}")
        wanted += found
    return list(dict.fromkeys(wanted))
