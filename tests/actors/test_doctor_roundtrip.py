"""`kvstore doctor --roundtrip`: blocks through each tier of a store of its own, with a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.actors.doctor import diagnose
from kvstore.actors.doctor.diagnose import check_roundtrip, judge_cluster
from kvstore.actors.doctor.own_folder import own_folder
from kvstore.errors import ConfigError, TransferTimeout
from kvstore.tools.doctor import Status

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def names_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_every_block_comes_back_from_every_tier(tmp_path):
    (tmp_path / "doctor-0").mkdir()
    check = check_roundtrip(str(tmp_path))
    assert check.status is Status.OK, check
    assert check.values == {"num_blocks": 4, "memory": 4, "disk": 4, "restart": 4}
    assert names_below(tmp_path) == ["doctor-0"], "what was there stays, and nothing else"


def test_a_path_that_cannot_be_used_fails_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    check = check_roundtrip(str(tmp_path / "file"))
    assert check.status is Status.FAIL
    assert "disk_path" in check.found
    assert names_below(tmp_path) == ["file"]


@pytest.mark.parametrize("below", ["", "not/there"])
def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch, below):
    def fail(words, environment, timeout_s):
        (Path(words[1]) / "doctor-0").mkdir()
        (Path(words[1]) / "doctor-0" / "slots-4096.bin").write_bytes(b"x")
        assert Path(words[1]).is_relative_to(tmp_path / below)
        raise TransferTimeout("no answer within 200 s")

    monkeypatch.setattr(diagnose, "_ask", fail)
    check = check_roundtrip(str(tmp_path / below))
    assert check.status is Status.FAIL
    assert names_below(tmp_path) == []


def test_a_folder_that_another_uses_by_then_stays(tmp_path):
    with own_folder(str(tmp_path / "new")) as own:
        (tmp_path / "new" / "other").write_text("")
    assert not Path(own).exists()
    assert names_below(tmp_path) == ["new", "new/other"]


@pytest.mark.parametrize("path", ["disk", "", "/a\0b"])
def test_a_path_that_is_not_absolute_is_refused(path):
    with pytest.raises(ConfigError, match="disk_path: wanted an absolute path"), own_folder(path):
        pass


def test_a_tier_that_is_written_and_never_read_is_named():
    seen = {"address": "h:1", "num_nodes": 1, "stores": ["default"], "unread_disks": []}
    assert judge_cluster(seen).status is Status.OK
    check = judge_cluster({**seen, "unread_disks": ["default on node abc (1,000 blocks)"]})
    assert check.status is Status.WARN
    assert "never read: default on node abc" in check.found
    assert "disk_min_uses=2" in check.fix
