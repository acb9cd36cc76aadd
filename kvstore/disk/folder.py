"""Choose the folder of a disk tier, lock it, and keep its label. No file of another program is ever changed.

Others may write beside the folder. So its owner is checked before anything in it is opened, no link is followed, and
only regular files of this user are used: a pipe or a device in place of one cannot hold up the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import clip
from kvstore.disk.own_files import TEMPORARY, open_own, read_own, write_whole
from kvstore.disk.records import TIER_ID_BYTES
from kvstore.errors import ConfigError
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

FORMAT = 2
LABEL, LOCK, VERSIONS = "tier.json", "lock", "versions.json"
_MAGIC = "raykv disk tier"
#: Begins the content of the lock, before the node that has it or had it last.
_LOCK_MAGIC = b"raykv disk tier of node "
_OURS = {LABEL, LOCK, VERSIONS}
_TIER_ID = re.compile(f"[0-9a-f]{{{2 * TIER_ID_BYTES}}}")
#: The two files of each size of slots, which their names say.
_SIZED = re.compile(r"(?:slots|index)-([1-9][0-9]{0,18})\.bin")
#: Node stores of one host that may share a path; each has a folder of its own.
_MOST_STORES = 64
#: How long a store waits for the one before it on the same node, which is just ending.
_WAIT_S, _LOOK_AGAIN_S = 10.0, 0.1
#: A label or a lock of more bytes is none of ours.
_MOST_BYTES = 4096


class Folder:
    """One locked folder. While it is open, no other store uses it.

    Args:
        path: of the folder.
        tier_id: of its label.
        lock_fd: of its lock.
    """

    def __init__(self, path: Path, tier_id: bytes, lock_fd: int) -> None:
        self.path, self.tier_id, self._lock_fd = path, tier_id, lock_fd

    def close(self) -> None:
        """Let the folder go; call this once."""
        os.close(self._lock_fd)


def read_label(folder: Path) -> bytes | None:
    """Return the id of the tier in a folder, or None if it has no label yet.

    Raises:
        ConfigError: there is a file in its place that no store of this version wrote.
    """
    file = folder / LABEL
    try:
        values = json.loads(read_own(file, _MOST_BYTES))
        if not isinstance(values, dict) or values.get("magic") != _MAGIC:
            raise ValueError("it names no disk tier")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: wanted the label of a disk tier, got a file that is none ({error}); give disk_path= another "
            "folder, or remove the file if it is of a damaged tier"
        ) from error
    tier_id = str(values.get("tier_id"))
    if values != _label_of(tier_id) or not _TIER_ID.fullmatch(tier_id):
        raise ConfigError(
            f"{file}: wanted files of format {FORMAT} with blocks in byte order {BLOCK_ORDER_VERSION}, got format "
            f"{clip(values.get('format'))} and byte order {clip(values.get('block_order'))} of another version of "
            f"raykv; nothing was changed. Run that version, give another disk_path=, or remove {folder}"
        )
    return bytes.fromhex(tier_id)


def _label_of(tier_id: str) -> dict[str, object]:
    return {"magic": _MAGIC, "format": FORMAT, "block_order": BLOCK_ORDER_VERSION, "tier_id": tier_id}


def _begin(folder: Path) -> bytes:
    """Return the id of the tier in a folder; a new folder gets its label."""
    if (tier_id := read_label(folder)) is None:
        tier_id = secrets.token_bytes(TIER_ID_BYTES)
        write_whole(folder / LABEL, json.dumps(_label_of(tier_id.hex()), indent=1).encode())
    return tier_id


def open_folder(root: str, store: str, node_id: str, num_bytes: int, wait_s: float = _WAIT_S) -> Folder:
    """Lock a folder below `root` that no other living store has: that of this node's last store, or the first free one.

    They are `<store>-0`, `<store>-1`, and so on. Several node stores of one host get different ones. Blocks are found
    by their hashes, whichever store wrote them.

    Args:
        root: an absolute path; made if it is not there.
        store: name of the store.
        node_id: of this store; a folder that the same node's last store has not let go yet is waited for.
        num_bytes: room that the tier needs.
        wait_s: how long to wait for that.

    Raises:
        ConfigError: the path cannot be used, has too little room, or holds files that are not a tier's.
    """
    with _disk_errors(root) as base:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _lock_first(base, store, node_id, num_bytes, clock.now_s() + wait_s)


def check_folder(root: str, store: str, node_id: str, num_bytes: int) -> None:
    """Check that `open_folder` would find a folder once this node's present store has let its own go; change nothing.

    Args:
        root: an absolute path.
        store: name of the store.
        node_id: of this store.
        num_bytes: room that the tier needs.

    Raises:
        ConfigError: as for `open_folder`.
    """
    with _disk_errors(root) as base:
        for path in _folders(base, store, node_id):
            if not os.path.lexists(path):  # As `mkdir` sees it: a link to nothing is there, too.
                _check_new(base, num_bytes)
                return
            _check_owner(path)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"{path.name} in it cannot be written")
            _check_ours(path)
            if not _was_held_by(path, _holder(node_id)) and _is_locked(path / LOCK):
                continue
            _check_room(path, num_bytes)
            return
        raise _too_many(base)


def _check_new(base: Path, num_bytes: int) -> None:
    """Check that a folder can be made below a path, with that path where it is not there yet."""
    there = next(path for path in (base, *base.parents) if os.path.lexists(path))
    # access(2) knows of no file system that makes no folders. The name is nobody else's.
    probe = there / f".raykv-{secrets.token_hex(8)}"
    probe.mkdir(mode=0o700)
    probe.rmdir()
    _check_room(there, num_bytes)


@contextlib.contextmanager
def _disk_errors(root: str) -> Iterator[Path]:
    """Give the body the path if nobody else can rename folders in it; raise what the system refuses as ConfigError."""
    base = Path(root)
    if not base.is_absolute():
        raise ConfigError(f"disk_path: wanted an absolute path, got {clip(root)}; the stores of all nodes use it")
    try:
        # Else another user could put a link in place of the tier's folder while the store runs.
        info = base.stat() if base.exists() else None
        is_shared = info and info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX
        if info and (is_shared or info.st_uid not in (0, os.geteuid())):
            raise ConfigError(
                f"disk_path: wanted a folder of user {os.geteuid()} or root that nobody else can write, or with the "
                f"sticky bit, got {base} of user {info.st_uid} with mode {info.st_mode & 0o7777:o}; chmod go-w or "
                "chmod +t it, chown it, or give another path"
            )
        yield base
    except OSError as error:
        raise ConfigError(
            f"disk_path: wanted a folder that is there or can be made, and that user {os.geteuid()} can write, got "
            f"{clip(root)}: {error.strerror or error}; give another path, or mend this one"
        ) from error


def _holder(node_id: str) -> bytes:
    return _LOCK_MAGIC + node_id.encode()


def _folders(base: Path, store: str, node_id: str) -> list[Path]:
    """Return the folders that a store may have, the one that this node had last first.

    So stores of one host that start anew have their own blocks again.
    """
    paths = [base / f"{store}-{number}" for number in range(_MOST_STORES)]
    return sorted(paths, key=lambda path: not _was_held_by(path, _holder(node_id)))


def _check_owner(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{path}: wanted a folder of user {os.geteuid()} with mode 0700, got mode {info.st_mode & 0o7777:o} of "
            f"user {info.st_uid}; give disk_path= another folder, or make it so if it is a disk tier of raykv"
        )


def _too_many(base: Path) -> ConfigError:
    return ConfigError(f"disk_path: wanted at most {_MOST_STORES} stores below {base}, got one more; give another path")


def _lock_first(base: Path, store: str, node_id: str, num_bytes: int, until_s: float) -> Folder:
    holder = _holder(node_id)
    for path in _folders(base, store, node_id):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_owner(path)
        _check_ours(path)  # Before the lock is made: in a folder of another program nothing is changed.
        lock_fd = _lock(path / LOCK, holder, until_s)
        if lock_fd is None:
            continue
        try:
            _check_room(path, num_bytes)
            return Folder(path, _begin(path), lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
    raise _too_many(base)


def _was_held_by(path: Path, holder: bytes) -> bool:
    with contextlib.suppress(OSError, ConfigError):
        _check_owner(path)
        return read_own(path / LOCK, _MOST_BYTES) == holder
    return False


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        fd = open_own(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def _lock(path: Path, holder: bytes, until_s: float) -> int | None:
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # The store before this one may still be ending; another node's store is not waited for.
                if os.pread(fd, len(holder) + 1, 0) != holder or clock.now_s() > until_s:
                    os.close(fd)
                    return None
                time.sleep(_LOOK_AGAIN_S)
        os.pwrite(fd, holder, 0)
        os.ftruncate(fd, len(holder))
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return fd


def _check_ours(path: Path) -> None:
    label, names = read_label(path), {entry.name for entry in path.iterdir()}
    strange = sorted(name for name in names if name.removesuffix(TEMPORARY) not in _OURS and not _SIZED.fullmatch(name))
    if not strange and LOCK in names:
        # Empty if its store ended in the middle of making it.
        strange = [] if _LOCK_MAGIC.startswith(read_own(path / LOCK, _MOST_BYTES)[: len(_LOCK_MAGIC)]) else [LOCK]
    elif not strange and names and label is None:
        strange = sorted(names)
    if strange:
        raise ConfigError(
            f"{path}: wanted an empty folder or a disk tier, got other files ({clip(strange[0])}); give disk_path= "
            "another folder; nothing was changed"
        )


def _check_room(path: Path, num_bytes: int) -> None:
    own = sum(entry.lstat().st_blocks * 512 for entry in path.iterdir() if _SIZED.fullmatch(entry.name))
    info = os.statvfs(path)
    room = info.f_bavail * info.f_frsize + own
    if num_bytes > room:
        raise ConfigError(
            f"disk_capacity_bytes: wanted room for {num_bytes} bytes at {path}, got {room}; lower it, free disk space, "
            "or give another disk_path="
        )


def sized_files(path: Path, slot_bytes: int) -> tuple[Path, Path]:
    """Return the files of one size of slots: that of the slots, and their index."""
    return path / f"slots-{slot_bytes}.bin", path / f"index-{slot_bytes}.bin"


def sizes_in(path: Path) -> dict[int, tuple[int, int]]:
    """Return for each size of slots that has files in a folder: (when it was written last, in ns; bytes of its files).

    Raises:
        OSError: the disk refused.
    """
    found = dict[int, tuple[int, int]]()
    for entry in path.iterdir():
        if name := _SIZED.fullmatch(entry.name):
            info, (written_ns, num_bytes) = entry.lstat(), found.get(int(name[1]), (0, 0))
            found[int(name[1])] = max(written_ns, info.st_mtime_ns), num_bytes + info.st_size
    return found
