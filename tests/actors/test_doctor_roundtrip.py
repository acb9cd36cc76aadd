"""`kvstore doctor --roundtrip`: blocks through each tier of a store of its own, with a restart."""

from __future__ import annotations

import pytest

from kvstore.actors.doctor.diagnose import check_roundtrip, judge_cluster
from kvstore.tools.doctor import Status

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_every_block_comes_back_from_every_tier(tmp_path):
    check = check_roundtrip(str(tmp_path / "disk"))
    assert check.status is Status.OK, check
    assert check.values == {"num_blocks": 4, "memory": 4, "disk": 4, "restart": 4}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["doctor-0"], "a folder that was named stays"


def test_a_path_that_cannot_be_used_fails_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    check = check_roundtrip(str(tmp_path / "file"))
    assert check.status is Status.FAIL
    assert "disk_path" in check.found


def test_a_tier_that_is_written_and_never_read_is_named():
    seen = {"address": "h:1", "num_nodes": 1, "stores": ["default"], "unread_disks": []}
    assert judge_cluster(seen).status is Status.OK
    check = judge_cluster({**seen, "unread_disks": ["default on node abc (1,000 blocks)"]})
    assert check.status is Status.WARN
    assert "never read: default on node abc" in check.found
    assert "disk_min_uses=2" in check.fix
