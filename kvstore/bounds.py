"""Bounds on numbers that come from outside: from peers, workers and Ray callers. What is beyond them is refused.

What the checks return is of Python's own type, and callers go on with that: a subclass cannot be sent.
"""

from __future__ import annotations

import math

from kvstore.errors import InvalidRequest

#: The longest time that a lease, a claim, a published ticket or a wait may be asked for. A pin may be for ever.
MAX_TTL_S = 86400.0
#: The most slots that an arena is divided into; a pool takes some 80 bytes for each.
MAX_SLOTS = 1 << 23
#: The smallest block. The first one that attaches decides how the arena is divided, and a slip must not make slots of
#: a few bytes.
MIN_BLOCK_BYTES = 512
#: The largest: what a peer, a mover and a ticket can be told of. What an arena has no room for is refused where it is
#: divided.
MAX_BLOCK_BYTES = (1 << 32) - 1
#: The most namespaces that one life of a store attaches.
MAX_NAMESPACES = 1 << 16
#: The longest run of blocks in one message, or argument, of a worker, a peer or a Ray caller: 131,072 blocks.
#: The control thread takes some milliseconds for as many, and everybody else waits.
MAX_CHAIN_BYTES = 4 << 20
#: The most leases and pins of a pool at once, whatever they hold: each takes some hundred bytes, and ends with time.
MAX_LEASES = 1 << 18
#: The most blocks of all leases and pins of a pool together, and of all its unfinished writes with what these keep, a
#: block counted as often as it is held. Each takes some twenty bytes; one run more is let in when it is nearly used up.
MAX_HELD_BLOCKS = 1 << 24
#: The most parts in which a block is written: one for each rank of an engine.
MAX_PARTS = 1024
#: The most threads that a caller may want for one copy; a copier takes fewer where that is better.
MAX_COPY_THREADS = 1024
MAX_OWNER_CHARS = 200
#: Of the id of a node: Ray's have 56. Tables and logs keep what a worker or a peer names.
MAX_NODE_ID_CHARS = 200
#: Digests of namespaces and hashes of blocks.
DIGEST_BYTES = 32


def clip(value: object, num_chars: int = 60) -> str:
    """Return a value for an error's text: what came from outside, however long it is, as a few characters."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        text = repr(value[:num_chars] if isinstance(value, str) else bytes(value[:num_chars]))
        return text if len(value) <= num_chars else f"{text}... ({len(value)} in all)"
    text = repr(value)
    return text if len(text) <= num_chars else f"{text[:num_chars]}..."


def check_bytes(name: str, value: object, most: int) -> bytes:
    """Return bytes that are not too many.

    Raises:
        InvalidRequest: they are, or are none.
    """
    if not isinstance(value, bytes) or len(value) > most:
        raise InvalidRequest(f"{name}: wanted at most {most} bytes, got {clip(value)}")
    return bytes(value)


def check_seconds(name: str, value: object, most_s: float = MAX_TTL_S) -> float:
    """Return a number of seconds, 0 or more.

    Raises:
        InvalidRequest: it is none, or too long.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most_s:
        raise InvalidRequest(f"{name}: wanted a number of seconds from 0 to {most_s:g}, got {clip(value)}")
    return _plain(value)


def check_ttl(name: str, value: object, most_s: float = MAX_TTL_S) -> float:
    """Return a number of seconds above 0, for which something is held.

    Raises:
        InvalidRequest: it is none, or too long. Refused and not cut down: who asks counts on what it asked for.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most_s:
        raise InvalidRequest(f"{name}: wanted a number of seconds above 0, at most {most_s:g}, got {clip(value)}")
    return _plain(value)


def _plain(seconds: float) -> float:
    # NumPy's float64 is a float to isinstance, and nothing that can be sent.
    try:
        return float(seconds)
    except OverflowError:
        return math.inf  # Allowed only where no time is too long.


def check_count(name: str, value: object, least: int, most: int) -> int:
    """Return an integer of a range, both ends included.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{name}: wanted an integer from {least} to {most}, got {clip(value)}")
    return int(value)


def check_text(name: str, value: object) -> str:
    """Return a text.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: wanted text, got {clip(value)}")
    return value if type(value) is str else str.__str__(value)


def check_digest(name: str, value: object) -> bytes:
    """Return the digest of a namespace, or the hash of a block.

    Raises:
        InvalidRequest: it is not 32 bytes.
    """
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        raise InvalidRequest(f"{name}: wanted {DIGEST_BYTES} bytes, got {clip(value)}")
    return bytes(value)
