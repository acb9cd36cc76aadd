"""Refuse values from outside (peers, workers, Ray callers) that are beyond a bound.

A check returns a value of Python's own type. Callers continue with that value: a subclass cannot be sent.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kvstore.errors import ConfigError, InvalidRequest

#: The longest time for a lease, a claim, a published ticket or a wait. A pin may have no deadline.
MAX_TTL_S = 86400.0
#: The most slots that an arena is divided into; a pool takes some 80 bytes for each.
MAX_SLOTS = 1 << 23
#: The smallest block. The first client that attaches decides how the arena is divided; a mistake there must not make
#: slots of a few bytes.
MIN_BLOCK_BYTES = 512
#: The largest block whose size fits in a ticket and in messages to peers and movers. A block too large for the arena
#: is refused when the arena is divided.
MAX_BLOCK_BYTES = (1 << 32) - 1
#: The most namespaces that one life of a store attaches.
MAX_NAMESPACES = 1 << 16
#: The longest run of blocks in one message, or argument, of a worker, a peer or a Ray caller: 131,072 blocks.
#: The control thread takes some milliseconds for that many, and all other callers wait meanwhile.
MAX_CHAIN_BYTES = 4 << 20
#: The most leases and pins of a pool at once, with or without blocks: each takes some hundred bytes.
MAX_LEASES = 1 << 18
#: The most blocks of all leases and pins of a pool, and separately of all its unfinished writes with the blocks they
#: pin. A block counts as often as it is held, some twenty bytes each. The last run may exceed the bound.
MAX_HELD_BLOCKS = 1 << 24
#: The most parts of a block: one per rank of an engine.
MAX_PARTS = 1024
#: The most threads that a caller may request for one copy; a copier takes fewer where that is better.
MAX_COPY_THREADS = 1024
MAX_OWNER_CHARS = 200
#: Longest id of a node (Ray's have 56). Bounded because tables and logs keep ids that workers and peers send.
MAX_NODE_ID_CHARS = 200
#: Size of a namespace digest and of a block hash.
DIGEST_BYTES = 32

#: Where a node may listen for subscribers: a port of some or all of its addresses, or a file.
_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]):([0-9]{1,5})|ipc:///[^\0]{1,90}")
_MOST_PORT = 65535
#: A port that is too long to be one.
_LONG_PORT = re.compile(r"tcp://.{1,253}:([0-9]{6,18})")
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def clip(value: object, num_chars: int = 60) -> str:
    """Return a value of any length as a short text for an error message."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        text = repr(value[:num_chars] if isinstance(value, str) else bytes(value[:num_chars]))
        return text if len(value) <= num_chars else f"{text}... ({len(value)} in all)"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print thousands of digits.
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} of long numbers"
    return text if len(text) <= num_chars else f"{text[:num_chars]}..."


def check_bytes(name: str, value: object, most: int) -> bytes:
    """Return the value as bytes, at most `most` of them.

    Raises:
        InvalidRequest: it is longer, or not bytes.
    """
    if not isinstance(value, bytes) or len(value) > most:
        raise InvalidRequest(f"{name}: wanted at most {most} bytes, got {clip(value)}")
    return bytes(value)


def check_seconds(name: str, value: object, most_s: float = MAX_TTL_S) -> float:
    """Return a number of seconds, 0 or more.

    Raises:
        InvalidRequest: the value is not a number, below 0, or above `most_s`.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most_s:
        raise InvalidRequest(f"{name}: wanted a number of seconds from 0 to {most_s:g}, got {clip(value)}")
    return _plain(value)


def check_ttl(name: str, value: object, most_s: float = MAX_TTL_S) -> float:
    """Return a number of seconds above 0, for which something is held.

    Raises:
        InvalidRequest: the value is not such a number, or above `most_s`. It is not shortened, because the caller
            relies on the time it asked for.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most_s:
        raise InvalidRequest(f"{name}: wanted a number of seconds above 0, at most {most_s:g}, got {clip(value)}")
    return _plain(value)


def _plain(seconds: float) -> float:
    # NumPy's float64 is a float to isinstance, but cannot be sent.
    try:
        return float(seconds)
    except OverflowError:
        return math.inf  # Passes the check only where no time is too long.


def check_count(name: str, value: object, least: int, most: int) -> int:
    """Return an integer of a range, both ends included.

    Raises:
        InvalidRequest: the value is not such an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{name}: wanted an integer from {least} to {most}, got {clip(value)}")
    return int(value)


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called.

    Raises:
        InvalidRequest: it cannot.
    """
    if not callable(value):
        raise InvalidRequest(f"{name}: wanted a function, got {clip(value)}")


def check_flag(name: str, value: object) -> bool:
    """Return True or False, also for a truth value of NumPy.

    Raises:
        InvalidRequest: the value is neither.
    """
    if isinstance(value, bool):
        return value
    if type(value).__name__ not in ("bool", "bool_"):  # By name: NumPy takes long to import, and not all need it.
        raise InvalidRequest(f"{name}: wanted True or False, got {clip(value)}")
    return bool(value)


def check_node_id(name: str, value: object) -> str:
    """Return the id of a node.

    Raises:
        InvalidRequest: it is not text, empty, too long, or cannot be sent.
    """
    text = str.__str__(value) if isinstance(value, str) else ""
    if not 0 < len(text) <= MAX_NODE_ID_CHARS or any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest(
            f"{name}: wanted the id of a node, 1 to {MAX_NODE_ID_CHARS} characters without lone surrogates, got "
            f"{clip(value)}; pass what Store.node_ids or a client says"
        )
    return text


def check_text(name: str, value: object) -> str:
    """Return a text.

    Raises:
        InvalidRequest: the value is not a str.
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


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes from `8GiB`, `512 MiB`, `1.5GB` or a plain integer.

    Raises:
        ConfigError: the text is not a size, or a fraction of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(f"wanted a size such as '8GiB' or a number of bytes, got {str(text)[:60]!r}")
    number, unit = Fraction(match.group(1)), _UNITS[match.group(2).lower()]
    if unit == 1 and number.denominator != 1:
        raise ConfigError(f"wanted a whole number of bytes, or a unit as in '1.5GiB', got {str(text)[:60]!r}")
    return int(number * unit)


def check_endpoint(name: str, value: str) -> str:
    """Return an address on which a node can listen for subscribers.

    Raises:
        ConfigError: it is neither "tcp://HOST:PORT" nor "ipc://PATH".
    """
    match = _ENDPOINT.fullmatch(value)
    port = _LONG_PORT.fullmatch(value) if match is None else match
    if port is not None and int(port.group(1) or 0) > _MOST_PORT:
        raise ConfigError(f"{name}: wanted a port from 0 to {_MOST_PORT}, got {clip(value)}; 0 takes a free one")
    if match is None:
        raise ConfigError(
            f"{name}: wanted an address like 'tcp://*:5557' or 'ipc:///run/raykv.ipc', got {clip(value)}; "
            "port 0 takes a free one"
        )
    return value


def check_apart(name: str, value: str, other_name: str, other: str) -> None:
    """Check that two addresses on which one node listens are not the same; port 0 is another one each time.

    Raises:
        ConfigError: they are.
    """
    if value and value == other and not value.endswith(":0"):
        raise ConfigError(f"{other_name}: wanted another address than {name}, got {clip(other)} for both; change one")
