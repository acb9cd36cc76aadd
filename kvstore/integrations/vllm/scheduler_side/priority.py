"""Read from a request's `kv_transfer_params` how much its stored blocks matter, and for how long."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvstore.blocks.priority import Priority, check_terms
from kvstore.errors import InvalidRequest

logger = logging.getLogger(__name__)

PRIORITY, PRIORITY_S = "raykv_priority", "raykv_priority_s"


def read_priority(params: Mapping[str, Any], req_id: str) -> tuple[Priority, float | None]:
    """Return priority and seconds for `Client.save`; after a warning NORMAL, if the params have a bad value."""
    asked = params.get(PRIORITY)
    try:
        return check_terms(Priority.NORMAL if asked is None else asked, params.get(PRIORITY_S))
    except InvalidRequest as error:
        logger.warning("blocks of request %s are saved as any others: kv_transfer_params: raykv_%s", req_id, error)
        return Priority.NORMAL, None
