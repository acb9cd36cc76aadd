"""Which settings a restart changes."""

from __future__ import annotations

import pytest

from kvstore.actors.restart.changing import changed
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError

SETTINGS = StoreConfig(capacity_bytes=1 << 20)


def test_sizes_are_given_as_to_start():
    assert changed(SETTINGS, {"capacity": "2MiB", "lease_ttl_s": 20.0}).capacity_bytes == 2 << 20


@pytest.mark.parametrize("changes", [{"name": "other"}, {"num_directory_shards": 2}, {"capacitance": 1}])
def test_what_a_restart_keeps_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        changed(SETTINGS, changes)
    assert changed(SETTINGS, {"name": "default", "num_directory_shards": 1}) == SETTINGS
