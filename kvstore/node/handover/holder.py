"""Hold the memory of a node's store between two of its lives. It maps nothing, and gives it to one process only."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from kvstore.errors import KVStoreError
from kvstore.node.handover.processes import has_ended
from kvstore.node.handover.transfer import (
    ASK,
    GIVE,
    HAVE,
    LEFT,
    MOST_WHY_BYTES,
    NOTHING,
    TAKE,
    Parcel,
    check_user,
    connect,
    receive,
    send,
)
from kvstore.rpc.socket_files import SocketFile
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: For one packet of a process that has connected.
_PACKET_S = 5.0
_LOOK_S = 0.5
#: How long a store that begins may take to take what its last life has left, before another restart goes on without.
TAKEN_WITHIN_S = 20.0
_ASK_EVERY_S = 0.2


class Holder:
    """Takes one parcel from the old store, and gives it to the first process that asks afterwards.

    So two stores never have one arena: the process that takes it is told which processes must have ended first.

    Another restart may have been killed after its store gave its memory. Then its holder has the only parcel, and stays
    at the path: `is_given` is true, and this holder does nothing. If the giver has ended, its next store may be about
    to take the parcel: this waits up to `TAKEN_WITHIN_S` for that, and then replaces the other holder.

    Args:
        path: of its socket, from `handover_path`; replaces the file of a holder that was killed or has nothing.
    """

    def __init__(self, path: str) -> None:
        self._parcel: Parcel | None = None
        self._until_s, self._is_over = 0.0, False
        self.is_closed = False
        #: What a store is told that asks for the parcel and gets none.
        self.why_nothing = ""
        self.is_given = _is_given(path)
        if self.is_given:
            return
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._file = SocketFile(path, self._sock)
            self._sock.listen(8)
            self._file.finish()
        except BaseException:
            self._sock.close()
            raise

    def kept_s(self) -> float:
        """Return how long the parcel will still be kept; 0.0 if it is not here, or not any more."""
        return 0.0 if self._parcel is None or self._is_over else max(0.0, self._until_s - clock.now_s())

    def keep_longer(self, keep_s: float) -> float:
        """Keep the parcel for `keep_s` from now on; return what `kept_s` does."""
        if self.kept_s() > 0:
            self._until_s = clock.now_s() + keep_s
        return self.kept_s()

    def run(self, keep_s: float, wait_s: float = 0.0) -> bool:
        """Serve until the parcel was taken, or `close` was called, or its time is over.

        Return whether it was taken here; at once if `is_given`.

        Args:
            keep_s: how long to keep the parcel, from when it was given or a restart last asked for it.
            wait_s: how much longer to wait for the parcel.
        """
        if self.is_given:
            return False
        self._until_s, was_taken = clock.now_s() + wait_s + keep_s, False
        try:
            while not was_taken and not self.is_closed and clock.now_s() < self._until_s:
                self._sock.settimeout(_LOOK_S)
                with contextlib.suppress(TimeoutError):
                    sock, _ = self._sock.accept()
                    with sock:
                        was_taken = self._serve(sock, keep_s)
        finally:
            self._is_over = True
            self._file.remove()
            self._sock.close()
            if self._parcel is not None:
                self._parcel.close()
        return was_taken

    def close(self) -> None:
        """End `run` soon; what is held is freed."""
        self.is_closed = True

    def _serve(self, sock: socket.socket, keep_s: float) -> bool:
        """Serve one connection; return whether the parcel was taken."""
        sock.settimeout(_PACKET_S)
        try:
            check_user(sock)
            word, parcel = receive(sock)
            if word == GIVE and parcel is not None and self._parcel is None:
                self._parcel, self._until_s = parcel, clock.now_s() + keep_s
                send(sock, HAVE)
                return False
            if parcel is not None:
                parcel.close()
            if word == ASK and self._parcel is not None:
                self._until_s = clock.now_s() + keep_s
                send(sock, LEFT if has_ended(self._parcel.processes[0]) else HAVE)
                return False
            if word != TAKE or self._parcel is None:
                send(sock, NOTHING + self.why_nothing.encode()[:MOST_WHY_BYTES])
                return False
            given, self._parcel = self._parcel, None
            # From here on it is the other's, even if that dies: nobody else may get it.
            with contextlib.closing(given), contextlib.suppress(OSError):
                send(sock, HAVE, given)
            return True
        except (OSError, KVStoreError) as error:
            logger.info("a process that asked for a store's memory got nothing: %s", error)
            return False


def _is_given(path: str) -> bool:
    """Return whether a holder at a path has a parcel of a store that lives, and serves nobody any more."""
    until_s = clock.now_s() + TAKEN_WITHIN_S
    while (word := _ask(path)) == LEFT and clock.now_s() < until_s:
        time.sleep(_ASK_EVERY_S)
    return word == HAVE


def _ask(path: str) -> bytes:
    try:
        with connect(path, 2 * _PACKET_S) as sock:  # It may be waiting for the packet of another.
            send(sock, ASK)
            word, parcel = receive(sock)
    except (OSError, KVStoreError):
        return NOTHING
    if parcel is not None:
        parcel.close()
    return word
