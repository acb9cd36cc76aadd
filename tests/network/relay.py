"""A wire between two network namespaces that delays and loses packets; for kernels without `tc netem`, too.

    python relay.py NAMESPACE INTERFACE NAMESPACE INTERFACE

Both interfaces are taps that exist. Lines `DELAY_S LOSS` on standard input set the delay in each direction and the
share of packets that are lost; each is answered with `ok`.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 16


def open_tap(namespace: str, interface: str) -> int:
    """Open a tap of a network namespace, which this thread enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(where, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(where)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", interface.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def read_settings(pending: bytearray) -> tuple[float, float] | None:
    """Return the newest settings that have arrived whole, and answer each line."""
    more = os.read(0, 4096)
    if not more:
        raise SystemExit(0)
    pending += more
    found = None
    while b"\n" in pending:
        line, _, rest = bytes(pending).partition(b"\n")
        pending[:] = rest
        delay_s, loss = line.split()
        found = float(delay_s), float(loss)
        os.write(1, b"ok\n")
    return found


def relay(taps: tuple[int, int]) -> None:
    # Losses are the same in every run, as far as the packets are.
    chance = random.Random(1)
    pending, delay_s, loss = bytearray(), 0.0, 0.0
    queues: dict[int, collections.deque[tuple[float, bytes]]] = {tap: collections.deque() for tap in taps}
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *taps], [], [], wait_s)
        if 0 in ready and (settings := read_settings(pending)):
            delay_s, loss = settings
        now_s = time.monotonic()
        for tap in taps:
            if tap in ready:
                other = taps[1] if tap == taps[0] else taps[0]
                frame = os.read(tap, _MOST_BYTES)
                if chance.random() >= loss:
                    queues[other].append((now_s + delay_s, frame))
        for tap, queue in queues.items():
            while queue and queue[0][0] <= now_s:
                try:
                    os.write(tap, queue.popleft()[1])
                except OSError:
                    continue  # That end is down, so the packet is lost.


if __name__ == "__main__":
    relay((open_tap(sys.argv[1], sys.argv[2]), open_tap(sys.argv[3], sys.argv[4])))
