"""Write a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kvstore.errors import ConfigError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name beside it, then rename it. A file that was there stays until then.

    Raises:
        ConfigError: it cannot be written; what was there before is there still, and nothing else.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: there is nothing to rename.
            path.write_bytes(data)
            return
        number, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(number)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{path}: wanted to write {len(data)} bytes there, got {error.strerror}; no part of it was left. Free "
                "some space, or name another file"
            ) from error
        raise


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before
