"""The folder of a disk tier: chosen, locked, labelled, and nobody else's files are touched."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from disk_store import SOON_S, checksum

from kvstore.disk.folder import FORMAT, INDEX, LABEL, LOCK, SLOTS, check_folder, open_folder
from kvstore.errors import ConfigError

SLOT_BYTES, NUM_SLOTS = 8192, 10


@pytest.fixture
def opened(tmp_path):
    """Open folders below one path, and close those that are still open."""
    made = []

    def opened(node_id="a", wait_s=0.0, root=tmp_path, num_bytes=1 << 16):
        folder = open_folder(str(root), "kv", node_id, num_bytes, wait_s)
        made.append(folder)
        return folder

    def close(folder):
        made.remove(folder)
        folder.close()

    opened.close = close
    yield opened
    for folder in made:
        folder.close()


def test_a_new_folder_and_its_label(opened, tmp_path):
    folder = opened()
    assert folder.path == tmp_path / "kv-0"
    assert folder.label() is None
    label, why = folder.begin(SLOT_BYTES, NUM_SLOTS)
    assert why == "new here"
    assert (label.slot_bytes, label.num_slots, folder.label()) == (SLOT_BYTES, NUM_SLOTS, label)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {LABEL: 0o600, LOCK: 0o600}
    opened.close(folder)
    again = opened("b")
    assert again.begin(SLOT_BYTES, NUM_SLOTS) == (label, ""), "whichever node wrote it"


def test_two_stores_have_their_own_folders(opened, tmp_path):
    """A6: two stores of one host never share files, and the second does not get what the first has."""
    first, second, third = opened("a"), opened("b"), opened("c")
    assert [folder.path.name for folder in (first, second, third)] == ["kv-0", "kv-1", "kv-2"]
    labels = [folder.begin(SLOT_BYTES, NUM_SLOTS)[0] for folder in (first, second, third)]
    assert len({label.tier_id for label in labels}) == 3
    opened.close(second)
    assert opened("d").path.name == "kv-1"


def test_a_node_gets_the_folder_again_that_it_had(opened):
    first, second = opened("a"), opened("b")
    opened.close(first)
    opened.close(second)
    assert opened("b").path.name == "kv-1"
    assert opened("c").path.name == "kv-0"
    assert opened("a").path.name == "kv-2", "another one has its folder now"


def test_the_same_node_waits_for_the_store_before_it(opened):
    first = opened("a")
    got = []
    waiter = threading.Thread(target=lambda: got.append(opened("a", wait_s=SOON_S)))
    waiter.start()
    time.sleep(0.05)
    assert got == []
    path = first.path
    opened.close(first)
    waiter.join(SOON_S)
    assert got[0].path == path


def test_the_same_node_takes_another_folder_when_the_time_is_over(opened):
    first = opened("a")
    assert opened("a", wait_s=0.2).path != first.path


def test_a_node_whose_name_begins_like_another_is_not_waited_for(opened):
    opened("node-1")
    began_s = time.monotonic()
    assert opened("node-10", wait_s=SOON_S).path.name == "kv-1"
    assert opened("node", wait_s=SOON_S).path.name == "kv-2"
    assert time.monotonic() - began_s < SOON_S


def refused(opened, folder, match, **more):
    """Assert that a folder is refused and nothing in it changed."""
    before = checksum(folder)
    with pytest.raises(ConfigError, match=match):
        opened(**more)
    assert checksum(folder) == before


def test_a_path_that_is_no_path(opened, tmp_path):
    with pytest.raises(ConfigError, match="absolute"):
        open_folder("some/where", "kv", "a", 1 << 16)
    (tmp_path / "file").write_text("x")
    refused(opened, tmp_path, "disk_path", root=tmp_path / "file")
    refused(opened, tmp_path, "disk_path", root=tmp_path / "file" / "below")
    (tmp_path / "kv-0").write_text("x")
    refused(opened, tmp_path, "wanted a folder")


def test_a_folder_that_cannot_be_written(opened, tmp_path, monkeypatch):
    """As root any folder can be written, so the system's answer is made here."""

    def refuse(path, *args, **more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    refused(opened, tmp_path, "that user .* can write")


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_can_enter(opened, tmp_path, mode):
    (tmp_path / "kv-0").mkdir()
    (tmp_path / "kv-0").chmod(mode)
    refused(opened, tmp_path, "mode 0700")


def test_a_folder_of_another_user(opened, tmp_path, monkeypatch):
    (tmp_path / "kv-0").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    refused(opened, tmp_path, "wanted a folder of user")


def test_a_link_in_place_of_the_folder(opened, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "kv-0").symlink_to(tmp_path / "real")
    refused(opened, tmp_path, "wanted a folder")


@pytest.mark.parametrize("name", [LOCK, SLOTS, INDEX, LABEL])
def test_a_link_in_place_of_a_file(opened, tmp_path, name):
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "kv-0"
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(tmp_path / "victim")
    refused(opened, tmp_path, "kv-0|disk_path")


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": b"mine"},
        {"notes.txt": b"mine", LOCK: b"4711"},
        {LOCK: b"4711"},
        {SLOTS: b"a program's own slots"},
        {SLOTS: b"x" * 100, INDEX: b"y"},
        {LABEL: b'{"magic": "other"}'},
        {LABEL: b"not json"},
        {LABEL: b""},
        {LABEL: b"[1]"},
        {"versions.json": b"{}"},
    ],
    ids=lambda files: "-".join(files),
)
def test_files_of_others_are_not_touched(opened, tmp_path, files):
    folder = tmp_path / "kv-0"
    folder.mkdir(mode=0o700)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    refused(opened, tmp_path, "kv-0")


def test_files_of_others_beside_a_tier(opened, tmp_path):
    folder = opened()
    folder.begin(SLOT_BYTES, NUM_SLOTS)
    opened.close(folder)
    (folder.path / "notes.txt").write_text("mine")
    refused(opened, tmp_path, "other files")


def test_what_a_killed_store_left_is_its_own(opened, tmp_path):
    """Half-made files, an empty lock, no lock, no label."""
    folder = opened()
    folder.begin(SLOT_BYTES, NUM_SLOTS)
    opened.close(folder)
    (folder.path / f"{LABEL}.new").write_bytes(b"{")
    (folder.path / LOCK).write_bytes(b"")
    opened.close(opened())
    (folder.path / LOCK).unlink()
    opened.close(opened())
    (folder.path / LABEL).unlink()
    again = opened()
    assert again.begin(SLOT_BYTES, NUM_SLOTS)[1] == "new here"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": FORMAT + 1}, "version"),
        ({"format": 0}, "version"),
        ({"more": 1}, "version"),
        ({"tier_id": "zz"}, "version"),
        ({"tier_id": "aa " * 8 + "bb"}, "version"),
        ({"num_slots": "many"}, "version"),
        ({"block_order": 999}, "byte order 999"),
        ({"slot_bytes": 4096}, "4096 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_of_another_version_begin_empty_with_a_reason(opened, change, why):
    folder = opened()
    label, _ = folder.begin(SLOT_BYTES, NUM_SLOTS)
    (folder.path / SLOTS).write_bytes(b"s")
    (folder.path / INDEX).write_bytes(b"i")
    (folder.path / "versions.json").write_bytes(b"{}")
    values = json.loads((folder.path / LABEL).read_bytes())
    (folder.path / LABEL).write_text(json.dumps(values | change))
    opened.close(folder)
    again = opened()
    new, reason = again.begin(SLOT_BYTES, NUM_SLOTS)
    assert why in reason
    assert new.tier_id != label.tier_id
    assert not (folder.path / SLOTS).exists()
    assert not (folder.path / INDEX).exists()
    assert (folder.path / "versions.json").exists(), "what was cleared stays cleared"


def test_another_capacity_keeps_the_tier(opened):
    folder = opened()
    label, _ = folder.begin(SLOT_BYTES, NUM_SLOTS)
    for num_slots in (NUM_SLOTS * 2, 2):
        again, why = folder.begin(SLOT_BYTES, num_slots)
        assert (again.tier_id, again.num_slots, why) == (label.tier_id, num_slots, "")


def test_no_room_on_the_file_system(opened, tmp_path):
    info = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="wanted room"):
        opened(num_bytes=info.f_blocks * info.f_frsize + (1 << 40))
    opened()  # Nothing stayed locked.


def test_a_refused_folder_is_not_locked(opened, tmp_path):
    (tmp_path / "kv-0").mkdir(mode=0o700)
    (tmp_path / "kv-0" / "notes.txt").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ConfigError):
            opened()
    assert len(os.listdir("/proc/self/fd")) == before


def check(root, node_id="a", num_bytes=1 << 16):
    return check_folder(str(root), "kv", node_id, num_bytes)


def listing(path):
    return sorted(str(each) for each in path.rglob("*"))


def test_a_check_finds_what_an_opening_would_and_changes_nothing(opened, tmp_path):
    check(tmp_path / "new" / "er")
    assert listing(tmp_path) == []
    first, other = opened("a"), opened("b")
    before = listing(tmp_path), (first.path / LOCK).read_bytes()
    check(tmp_path, "a")
    check(tmp_path, "b")
    check(tmp_path, "c")
    opened.close(other)
    check(tmp_path, "c")
    assert (listing(tmp_path), (first.path / LOCK).read_bytes()) == before


@pytest.mark.parametrize("link", ["kv", "kv/kv-0"])
def test_a_link_to_nothing_is_refused_by_a_check_as_by_an_opening(tmp_path, link):
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "nothing")
    for refuse in (check, lambda root: open_folder(str(root), "kv", "a", 1 << 16, 0.0)):
        with pytest.raises(ConfigError, match="wanted a folder"):
            refuse(tmp_path / "kv")
    assert listing(tmp_path / "kv") == ([str(tmp_path / link)] if "/" in link else [])


@pytest.mark.parametrize("root", ["/proc/nvme", "/dev/null/x", "relative"])
def test_a_check_refuses_a_path_that_cannot_be_a_folder(root):
    with pytest.raises(ConfigError, match="disk_path"):
        check(root)


def test_a_check_wants_to_write_only_where_a_store_would(opened, tmp_path, monkeypatch):
    opened.close(opened("a"))

    def no_folder(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", no_folder)
    check(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"disk_path: wanted a folder .* Permission denied"):
        check(tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="kv-0 in it cannot be written"):
        check(tmp_path, "a")


def test_a_check_counts_what_the_present_files_of_this_node_take_and_refuses_those_of_others(opened, tmp_path):
    folder = opened("a")
    room = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="disk_capacity_bytes: wanted room"):
        check(tmp_path, "b", room.f_blocks * room.f_frsize + 1)
    own_bytes = 1 << 22
    with open(folder.path / SLOTS, "wb") as slots:
        os.posix_fallocate(slots.fileno(), 0, own_bytes)
    info = os.statvfs_result((*room[:3], 1, 1, *room[5:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: info)
        check(tmp_path, "a", own_bytes)
        with pytest.raises(ConfigError, match="disk_capacity_bytes: wanted room"):
            check(tmp_path, "b", own_bytes)
    (folder.path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        check(tmp_path, "a")
