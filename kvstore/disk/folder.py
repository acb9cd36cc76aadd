"""Choose the folder of a disk tier, lock it, and keep its label. No file of another program is ever changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import clip
from kvstore.disk.records import TIER_ID_BYTES
from kvstore.errors import ConfigError
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

FORMAT = 1
LABEL, LOCK, SLOTS, INDEX, VERSIONS = "tier.json", "lock", "slots.bin", "index.bin", "versions.json"
_MAGIC = "raykv disk tier"
#: Begins the content of the lock, before the node that has it or had it last.
_LOCK_MAGIC = b"raykv disk tier of node "
_OURS = {LABEL, LOCK, SLOTS, INDEX, VERSIONS}
_TEMPORARY = ".new"
#: Node stores of one host that may share a path; each has a folder of its own.
_MOST_STORES = 64
#: How long a store waits for the one before it on the same node, which is just ending.
_WAIT_S, _LOOK_AGAIN_S = 10.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The first file that a store reads in its folder. It says how to read the others.

    Args:
        tier_id: of this set of files, hexadecimal; every record repeats it.
        slot_bytes: bytes of a slot in memory; on disk a page more.
        num_slots: number of slots in the slot file.
        block_order: version of the byte order of blocks.
        format: version of these files.
        magic: says that the folder is a tier's.
    """

    tier_id: str
    slot_bytes: int
    num_slots: int
    block_order: int = BLOCK_ORDER_VERSION
    format: int = FORMAT
    magic: str = _MAGIC


class Folder:
    """One locked folder. While it is open, no other store uses it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    def label(self) -> Label | None:
        """Return the label, or None if there is none or it is of another version of the files.

        Raises:
            ConfigError: there is a file in its place that no store wrote.
        """
        file = self.path / LABEL
        try:
            values = json.loads(file.read_bytes())
            if not isinstance(values, dict) or values.get("magic") != _MAGIC:
                raise ValueError("it names no disk tier")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: wanted the label of a disk tier, got a file that is none ({error}); give disk_path= another "
                "folder, or remove the file if it is of a damaged tier"
            ) from error
        if values.get("format") != FORMAT:
            return None
        try:
            label = Label(**values)
            num_id_bytes = len(bytes.fromhex(label.tier_id))
        except (TypeError, ValueError):
            return None
        is_whole = isinstance(label.slot_bytes, int) and isinstance(label.num_slots, int)
        return label if is_whole and num_id_bytes == TIER_ID_BYTES else None

    def begin(self, slot_bytes: int, num_slots: int) -> tuple[Label, str]:
        """Return the label for slots of this size, and why the tier begins empty; "" if it keeps its blocks.

        Raises:
            ConfigError: as for `label`.
            OSError: the label cannot be written.
        """
        old, why = self.label(), ""
        if old is None:
            has_any = any((self.path / name).exists() for name in (SLOTS, INDEX))
            why = "its files are of another version" if has_any else "new here"
        elif old.slot_bytes != slot_bytes:
            why = f"its slots have {old.slot_bytes} bytes, this store's have {slot_bytes}"
        elif old.block_order != BLOCK_ORDER_VERSION:
            why = f"its blocks are in byte order {old.block_order}, this store's in {BLOCK_ORDER_VERSION}"
        if why:
            for name in (LABEL, INDEX, SLOTS):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).unlink()
            old = Label(tier_id=secrets.token_hex(TIER_ID_BYTES), slot_bytes=slot_bytes, num_slots=num_slots)
        assert old is not None
        label = replace(old, num_slots=num_slots)
        write_whole(self.path / LABEL, json.dumps(asdict(label), indent=1).encode())
        return label, why

    def close(self) -> None:
        """Let the folder go; call this once."""
        os.close(self._lock_fd)


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
            Folder(path, -1).label()
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
    """Give the body the path, and raise what the system refuses there as ConfigError."""
    base = Path(root)
    if not base.is_absolute():
        raise ConfigError(f"disk_path: wanted an absolute path, got {clip(root)}; the stores of all nodes use it")
    try:
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
            Folder(path, lock_fd).label()
        except BaseException:
            os.close(lock_fd)
            raise
        return Folder(path, lock_fd)
    raise _too_many(base)


def _was_held_by(path: Path, holder: bytes) -> bool:
    with contextlib.suppress(OSError):
        return (path / LOCK).read_bytes() == holder
    return False


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def _lock(path: Path, holder: bytes, until_s: float) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
    names = {entry.name for entry in path.iterdir()}
    strange = sorted(names - _OURS - {name + _TEMPORARY for name in _OURS})
    if not strange and LOCK in names:
        # Empty if its store ended in the middle of making it.
        strange = [] if _LOCK_MAGIC.startswith((path / LOCK).read_bytes()[: len(_LOCK_MAGIC)]) else [LOCK]
    elif not strange and names and Folder(path, -1).label() is None:
        strange = sorted(names)
    if strange:
        raise ConfigError(
            f"{path}: wanted an empty folder or a disk tier, got other files ({clip(strange[0])}); give disk_path= "
            "another folder; nothing was changed"
        )


def _check_room(path: Path, num_bytes: int) -> None:
    own = sum((path / name).stat().st_blocks * 512 for name in (SLOTS, INDEX) if (path / name).exists())
    info = os.statvfs(path)
    room = info.f_bavail * info.f_frsize + own
    if num_bytes > room:
        raise ConfigError(
            f"disk_capacity_bytes: wanted room for {num_bytes} bytes at {path}, got {room}; lower it, free disk space, "
            "or give another disk_path="
        )


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file at once: after a crash it has the old or the new content, never a part.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    new = path.with_name(path.name + _TEMPORARY)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(f"{new}: not all of {len(data)} bytes were written")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
