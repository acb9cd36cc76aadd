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


@contextlib.contextmanager
def own_folder(path: str) -> Iterator[str]:
    """Yield a new folder below `path`. It is removed afterwards, also after an error.

    Args:
        path: absolute. If it is not there it is made, and removed as well, unless another process uses it by then.

    Raises:
        ConfigError: no folder can be made there; nothing is left.
    """
    base = Path(path)
    if not base.is_absolute() or "\0" in path:
        raise ConfigError(f"disk_path: wanted an absolute path, got {clip(path)}; the stores of all nodes use it")
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
