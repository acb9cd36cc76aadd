"""Pass descriptors from an old store through a holder to the new one, over a Unix socket of the node."""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import socket_dir
from kvstore.errors import ProtocolError, StoreUnavailable

#: Words of a packet: the old store gives; the holder has it; the new store takes; there is nothing (any more).
#: Behind that last word may come why.
GIVE, HAVE, TAKE, NOTHING = b"give", b"have", b"take", b"none"
#: Another holder asks for the path; this one has a parcel of a store that has ended.
ASK, LEFT = b"asks", b"left"
#: Descriptors that the kernel passes at once, at most.
MOST_DESCRIPTORS = 250
MOST_WHY_BYTES = 1000
_WORD_BYTES = MOST_WHY_BYTES + 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one life gives to the next; the holder of this object owns the descriptors and closes them.

    Args:
        arena: the arena's file.
        message: a file with the sealed message.
        processes: pidfds: of the old store, of its mover (of the store again if there is none), and of each worker
            that may still use slots.
    """

    arena: int
    message: int
    processes: tuple[int, ...]

    @property
    def fds(self) -> list[int]:
        """All descriptors in the order in which they travel."""
        return [self.arena, self.message, *self.processes]

    def close(self) -> None:
        """Close all descriptors; call this once."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def handover_path(store: str, node_id: str) -> str:
    """Return the path of the holder's socket for a node's store."""
    name = hashlib.blake2b(store.encode(), digest_size=4).hexdigest()
    return str(socket_dir() / f"{node_id[:16]}-{name}.hand")


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to a holder; the caller closes the socket.

    Raises:
        StoreUnavailable: there is none, or it is of another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        check_user(sock)
        return sock
    except OSError as error:
        sock.close()
        raise StoreUnavailable(f"no process holds the memory of node stores at {Path(path).name}: {error}") from error
    except BaseException:
        sock.close()
        raise


def check_user(sock: socket.socket) -> None:
    """Check that the other side is a process of this user.

    Raises:
        StoreUnavailable: it is not.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise StoreUnavailable(f"wanted a process of user {os.geteuid()} at the other side, got one of user {user}")


def send(sock: socket.socket, word: bytes, parcel: Parcel | None = None) -> None:
    """Send a word, and with it a parcel, which stays the caller's. One packet: it arrives whole or not at all.

    Raises:
        OSError: the other side is gone, or does not read in time.
    """
    socket.send_fds(sock, [word], [] if parcel is None else parcel.fds)


def receive(sock: socket.socket) -> tuple[bytes, Parcel | None]:
    """Return a word, and the parcel that came with it, which is the caller's.

    Raises:
        ProtocolError: it is no packet of this protocol.
        OSError: no packet came in time.
    """
    fds, room = array.array("i"), socket.CMSG_LEN(4 * (MOST_DESCRIPTORS + 3))
    # Not `recv_fds`, which ignores its flags in Python 3.11: then each fork of this process would have these, too.
    word, ancillary, flags, _ = sock.recvmsg(_WORD_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not fds and not flags & socket.MSG_CTRUNC:
        return word, None
    if len(fds) < 4 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"wanted the arena, its index and the old store's process, got {len(fds)} descriptors")
    arena, message, *processes = fds
    return word, Parcel(arena, message, tuple(processes))
