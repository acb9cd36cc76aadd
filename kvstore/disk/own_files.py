"""Open, read and replace files below `disk_path`, where others may write, too."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.errors import ConfigError

#: Ends the name of a file that takes the place of another.
TEMPORARY = ".new"


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user that nobody else can write; never wait for a pipe or a device in its place.

    Raises:
        ConfigError: it is something else; nothing was read or written.
        OSError: it cannot be opened, or is a link.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022:
        return fd
    os.close(fd)
    raise ConfigError(
        f"{path}: wanted a file of user {os.geteuid()} that no other user can write, got "
        f"{stat.filemode(info.st_mode)} of user {info.st_uid}; give disk_path= another folder"
    )


def read_own(path: Path, most_bytes: int) -> bytes:
    """Return the content of a small file that `open_own` accepts.

    Raises:
        ConfigError, OSError: as for `open_own`; or it has more than so many bytes.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ConfigError(f"{path}: wanted at most {most_bytes} bytes, got more; give disk_path= another folder")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file at once: after a crash it has the old or the new content, never a part.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    new = path.with_name(path.name + TEMPORARY)
    fd = open_own(new, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(fd, len(data))
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
