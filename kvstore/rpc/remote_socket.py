"""Options of connections between hosts, the same on both sides: small messages at once, and the end of a lost host."""

from __future__ import annotations

import socket

#: A host that vanished says nothing, so an idle connection is probed: after so long, this often, so many times.
KEEP_IDLE_S, KEEP_INTERVAL_S, KEEP_PROBES = 5, 2, 5


def prepare_remote(sock: socket.socket) -> None:
    """Have a connection fail within 15 s when its other host is gone, whether anything is being sent or not.

    The kernel of a process that is merely stopped goes on answering.
    """
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, KEEP_IDLE_S)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, KEEP_INTERVAL_S)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, KEEP_PROBES)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * (KEEP_IDLE_S + KEEP_INTERVAL_S * KEEP_PROBES))
