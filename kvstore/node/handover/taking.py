"""Take over the memory of a node's last store, if a holder has it and all of it fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, ProtocolError, StoreUnavailable
from kvstore.memory.arena import keep_arena
from kvstore.node.handover.message import check_samples, image_of, unseal
from kvstore.node.handover.moving import fits, move
from kvstore.node.handover.needs import check_places
from kvstore.node.handover.old_life import Beginning, OldLife, check_is_of
from kvstore.node.handover.processes import end, pid_of
from kvstore.node.handover.transfer import NOTHING, TAKE, Parcel, connect, receive, send
from kvstore.runtime.life import log_life

#: For the holder's answer.
_ANSWER_S = 5.0
#: How long the old store and its mover may take to end, and to be gone once they are killed.
_ENDS_WITHIN_S, _KILLED_WITHIN_S = 5.0, 5.0
#: A message of more bytes is none of ours: some 200 bytes for each slot of the largest pool.
_MOST_MESSAGE_BYTES = 1 << 32

T = TypeVar("T")


def take_old_life(path: str, config: StoreConfig, node_id: str) -> tuple[OldLife | None, str]:
    """Take the memory from the holder at a path. When this returns, nobody else can have it.

    Returns:
        (the old life, ""), or (None, why this store begins cold), or (None, "") if nothing is held there.

    Raises:
        ConfigError: this store cannot have its disk or its addresses; the memory is still held.
    """
    if not Path(path).exists():
        return None, ""
    # First: it is given once only, and a store that fails later has lost it.
    check_places(config, node_id)
    try:
        with connect(path, _ANSWER_S) as sock:
            send(sock, TAKE)
            word, parcel = receive(sock)
    except (OSError, KVStoreError) as error:
        return None, f"the memory of the old store could not be taken: {error}"
    if parcel is None:
        return None, word.removeprefix(NOTHING).decode(errors="replace") or "the old store gave nothing"
    try:
        return _open(parcel, config, node_id), ""
    except (OSError, KVStoreError, ValueError, LookupError) as error:
        parcel.close()
        return None, str(error)


def _open(parcel: Parcel, config: StoreConfig, node_id: str) -> OldLife:
    # First: whatever is read of the memory may change as long as that process lives.
    store, mover = parcel.processes[:2]
    if pid_of(store) is None or pid_of(store) == os.getpid():
        raise ProtocolError("the memory comes from no store, or from this process itself")
    if not end(store, _ENDS_WITHIN_S, _KILLED_WITHIN_S):
        raise StoreUnavailable("the old store does not end, so its memory is not used again")
    # Its READs may write to slots, which wait for its end if it stays.
    end(mover, _ENDS_WITHIN_S, _KILLED_WITHIN_S)
    size = os.fstat(parcel.message).st_size
    if size > _MOST_MESSAGE_BYTES:
        raise ProtocolError(f"the index of the old store has {size} bytes; this store begins cold")
    message = unseal(_read(parcel.message, size))
    check_is_of(message, config, node_id)
    if any(at >= len(parcel.processes) for held in message.writers + message.readers for at in held.processes):
        raise ProtocolError("the index of the old store names a process that did not come with it")
    image = image_of(message)
    arena = keep_arena(os.dup(parcel.arena), message.capacity_bytes)
    try:
        check_samples(message, arena.memory)
        if not fits(message, config):
            old = arena
            arena, message, image = move(old, message, image, config)
            old.close()
    except BaseException:
        arena.close()
        raise
    os.close(parcel.message)
    os.close(parcel.arena)
    return OldLife(arena, message, image, parcel.processes)


def _read(fd: int, size: int) -> bytes:
    pieces, at = list[bytes](), 0
    while at < size and (piece := os.pread(fd, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def begin(make: Callable[[OldLife | None], T], old: OldLife | None, why_cold: str) -> tuple[T, Beginning]:
    """Make a node core with an old life, or without if that fails; return it, and how it began."""
    if old is not None:
        try:
            return make(old), old.beginning
        except KVStoreError as error:
            why_cold = f"the memory of the old store could not be used: {error}"
            old.processes.close()
    if why_cold:
        log_life("cold_start", reason=why_cold)
    return make(None), Beginning(why_cold=why_cold)
