"""The folder of a disk tier: chosen, locked, labelled, and nobody else's files are touched."""

import errno
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from disk_store import SOON_S, checksum

from kvstore.disk.folder import FORMAT, LABEL, LOCK, VERSIONS, check_folder, open_folder, sized_files
from kvstore.disk.own_files import open_own
from kvstore.errors import ConfigError

SLOTS, INDEX = (path.name for path in sized_files(Path(), 8192))


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
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {LABEL: 0o600, LOCK: 0o600}
    opened.close(folder)
    assert opened("b").tier_id == folder.tier_id, "whichever node wrote it"


def test_two_stores_have_their_own_folders(opened, tmp_path):
    """A6: two stores of one host never share files, and the second does not get what the first has."""
    first, second, third = opened("a"), opened("b"), opened("c")
    assert [folder.path.name for folder in (first, second, third)] == ["kv-0", "kv-1", "kv-2"]
    assert len({folder.tier_id for folder in (first, second, third)}) == 3
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
    opened.close(folder)
    (folder.path / "notes.txt").write_text("mine")
    refused(opened, tmp_path, "other files")


def test_what_a_killed_store_left_is_its_own(opened, tmp_path):
    """Half-made files, an empty lock, no lock, no label."""
    folder = opened()
    opened.close(folder)
    (folder.path / f"{LABEL}.new").write_bytes(b"{")
    (folder.path / LOCK).write_bytes(b"")
    opened.close(opened())
    (folder.path / LOCK).unlink()
    opened.close(opened())
    (folder.path / LABEL).unlink()
    assert opened().tier_id != folder.tier_id


@pytest.mark.parametrize(
    "change",
    [
        {"format": FORMAT + 1},
        {"format": 1, "slot_bytes": 8192, "num_slots": 10},
        {"more": 1},
        {"tier_id": "zz"},
        {"tier_id": "aa " * 8 + "bb"},
        {"block_order": 999},
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_of_another_version_are_refused_in_words_and_stay(opened, tmp_path, change):
    folder = opened()
    (folder.path / SLOTS).write_bytes(b"s")
    (folder.path / INDEX).write_bytes(b"i")
    (folder.path / "of-another-version").write_bytes(b"n")
    (folder.path / VERSIONS).write_bytes(b"{}")
    values = json.loads((folder.path / LABEL).read_bytes())
    (folder.path / LABEL).write_text(json.dumps(values | change))
    opened.close(folder)
    refused(opened, tmp_path, r"another version of raykv; nothing was changed\. Run that version")


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


@pytest.mark.parametrize("name", [LOCK, LABEL, VERSIONS, SLOTS, INDEX])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "others can write it"])
def test_what_is_no_file_of_this_user_is_refused_and_never_waited_for(opened, tmp_path, name, kind):
    folder = opened()
    opened.close(folder)
    path = folder.path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero has no end.
        except PermissionError:
            pytest.skip("this user can make no device")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        path.chmod(0o666)
    with pytest.raises((ConfigError, OSError)):
        os.close(open_own(path, os.O_RDWR))
    if name in (LOCK, LABEL):
        with pytest.raises(ConfigError, match=f"{name}|disk_path"):
            opened()
        with pytest.raises(ConfigError, match=f"{name}|disk_path"):
            check(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_folder_of_another_user_is_not_looked_into(opened, tmp_path, monkeypatch, kind):
    """One that may write beside this store's folder cannot hold up its start, nor make it read without end."""
    other = tmp_path / "kv-63"
    other.mkdir(mode=0o755)
    (os.mkfifo if kind == "pipe" else lambda path: path.symlink_to("/dev/zero"))(other / LOCK)
    opened()
    check(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="wanted a folder of user"):
        opened()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_path_where_others_could_rename_the_folder_is_refused(opened, tmp_path, mode):
    """Else they put a link in its place while the store runs, and it writes another folder's files."""
    root = tmp_path / "scratch"
    root.mkdir()
    root.chmod(mode)
    for refuse in (check, lambda root: opened(root=root)):
        with pytest.raises(ConfigError, match=f"disk_path: wanted a folder of user .* mode {mode:o}; chmod go-w"):
            refuse(root)
    assert listing(root) == []
    root.chmod(mode | stat.S_ISVTX)
    check(root)
    opened(root=root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_path_of_another_user_is_refused(opened, tmp_path):
    tmp_path.chmod(0o1777)
    os.chown(tmp_path, 65534, 65534)
    for refuse in (check, lambda root: opened(root=root)):
        with pytest.raises(ConfigError, match="of user 65534"):
            refuse(tmp_path)


def test_a_lock_or_a_label_without_end_is_not_read_whole(opened, tmp_path):
    folder = opened()
    opened.close(folder)
    for name in (LOCK, LABEL):
        with open(folder.path / name, "r+b") as file:
            file.truncate(1 << 40)
        with pytest.raises(ConfigError, match="wanted at most"):
            check(tmp_path)
        (folder.path / name).unlink()


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
