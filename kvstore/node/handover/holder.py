"""Hold the memory of a node's store between two of its lives. It maps nothing, and gives it to one process only."""

from __future__ import annotations

import contextlib
import logging
import socket

from kvstore.errors import KVStoreError
from kvstore.node.handover.transfer import GIVE, HAVE, NOTHING, TAKE, Parcel, check_user, receive, send
from kvstore.rpc.socket_files import SocketFile
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: For one packet of a process that has connected.
_PACKET_S = 5.0
_LOOK_S = 0.5


class Holder:
    """Takes one parcel from the old store, and gives it to the first process that asks afterwards.

    So two stores never have one arena: the process that takes it is told which processes must have ended first.

    Args:
        path: of its socket, from `handover_path`; replaces the file of a holder that was killed.
    """

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._file = SocketFile(path, self._sock)
            self._sock.listen(8)
            self._file.finish()
        except BaseException:
            self._sock.close()
            raise
        self._parcel: Parcel | None = None
        self.is_closed = False

    def run(self, keep_s: float) -> bool:
        """Serve until the parcel was taken, `keep_s` have passed or `close` was called; return whether it was taken."""
        until_s, was_taken = clock.now_s() + keep_s, False
        try:
            while not was_taken and not self.is_closed and clock.now_s() < until_s:
                self._sock.settimeout(_LOOK_S)
                with contextlib.suppress(TimeoutError):
                    sock, _ = self._sock.accept()
                    with sock:
                        was_taken = self._serve(sock)
        finally:
            self._file.remove()
            self._sock.close()
            if self._parcel is not None:
                self._parcel.close()
        return was_taken

    def close(self) -> None:
        """End `run` soon; what is held is freed."""
        self.is_closed = True

    def _serve(self, sock: socket.socket) -> bool:
        """Serve one connection; return whether the parcel was taken."""
        sock.settimeout(_PACKET_S)
        try:
            check_user(sock)
            word, parcel = receive(sock)
            if word == GIVE and parcel is not None and self._parcel is None:
                self._parcel = parcel
                send(sock, HAVE)
                return False
            if parcel is not None:
                parcel.close()
            if word != TAKE or self._parcel is None:
                send(sock, NOTHING)
                return False
            given, self._parcel = self._parcel, None
            # From here on it is the other's, even if that dies: nobody else may get it.
            with contextlib.closing(given), contextlib.suppress(OSError):
                send(sock, HAVE, given)
            return True
        except (OSError, KVStoreError) as error:
            logger.info("a process that asked for a store's memory got nothing: %s", error)
            return False
