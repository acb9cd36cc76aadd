"""A folder for the round trip's disk tier below a path of the user, which is afterwards as it was before."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvstore.bounds import clip
from kvstore.errors import ConfigError


def check_path(path: str) -> None:
    """Check the form of a path for the round trip's disk tier.

    Raises:
        ConfigError: it is not absolute.
    """
    if not Path(path).is_absolute() or "\0" in path:
        raise ConfigError(
            f"disk_path: wanted an absolute path, got {clip(path)}; the stores of all nodes use it: give one that "
            f"begins with /, like {os.path.abspath(path.replace(chr(0), ''))}"
        )


@contextlib.contextmanager
def own_folder(path: str) -> Iterator[str]:
    """Yield a new folder below `path`. It is removed afterwards, also after an error.

    Args:
        path: absolute. If it is not there it is made, and removed as well, unless another process uses it by then.

    Raises:
        ConfigError: no folder can be made there; nothing is left.
    """
    check_path(path)
    base = Path(path)
    missing = [folder for folder in (base, *base.parents) if not os.path.exists(folder)]
    own = None
    try:
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix="doctor-", dir=base)
        except OSError as error:
            raise ConfigError(
                f"disk_path: wanted a folder that can be written, got {clip(path)}: {error}; give another path, or "
                "make it writable"
            ) from error
        yield own
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        for folder in missing:  # The innermost first; one that has something else by now stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
