"""A node's store as an actor, before it has made anything."""

from __future__ import annotations

import pytest

from kvstore.actors.node_store import NodeStore
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError


def test_a_node_with_another_version_than_the_supervisor_makes_no_store():
    wanted = PROTOCOL_VERSION + 1
    with pytest.raises(
        ConfigError, match=f"wanted raykv of protocol {wanted}, .*, got raykv .*protocol {PROTOCOL_VERSION}"
    ):
        NodeStore("a" * 56, StoreConfig().to_json(), wanted)
