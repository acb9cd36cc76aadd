"""What a mover process of its own costs, and what it saves: the measurement behind docs/adr/0004.

Two questions, answered with real NIXL between plain processes of this machine:

1. The hop. How long does one small READ take when the process that wants it posts it itself, and how long
   when it asks a mover over a Unix socket?
2. The abort. A READ over TCP is in flight, its source is stopped, the reader gives up, the source resumes.
   Are the bytes of the destination overwritten afterwards, if the reader only dropped the handle, and if the
   reader's process was killed? And does the source's process survive?

    python benchmarks/studies/mover_process.py --json > benchmarks/results/mover-process.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import time
from io import FileIO
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvstore.memory.arena import attach_arena, create_arena
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64
ROUNDS = 300
TRIALS = 3
SPAWN = multiprocessing.get_context("spawn")


def _transport(lane: str, fd: int) -> tuple[Any, Any]:
    from kvstore.config import set_ucx_lane

    set_ucx_lane(lane)
    from kvstore.mover.nixl import NixlTransport

    arena = attach_arena(FileIO(fd), BLOCK_BYTES * NUM_BLOCKS)
    arena.populate()
    # One agent with a progress thread, as one inside a node store would be.
    transport = NixlTransport(f"bench-{secrets.token_hex(6)}", arena.address, arena.num_bytes, separate_reader=False)
    transport.set_slots(BLOCK_BYTES, NUM_BLOCKS)
    return arena, transport


def source(pipe: Connection, lane: str) -> None:
    """Own a slab full of 0x11, describe it, and stay."""
    arena = create_arena(BLOCK_BYTES * NUM_BLOCKS)
    mapped, transport = _transport(lane, os.dup(arena.fd))
    arena.bytes_view()[:] = 0x11
    pipe.send(
        PeerDescription(
            agent=transport.describe(), address=mapped.address, slot_bytes=BLOCK_BYTES, num_slots=NUM_BLOCKS
        )
    )
    while not pipe.poll(60.0):
        pass


def reader(pipe: Connection, lane: str, fd_pid: tuple[int, int], peer: PeerDescription) -> None:
    """Serve READs asked for over a pipe of SEQPACKET messages: b'r' one small, b's' post all and wait, b'd' drop."""
    pid, fd = fd_pid
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    arena, transport = _transport(lane, own)  # The mapping must outlive the READs.
    transport.add_peer("source", peer)
    every = np.arange(NUM_BLOCKS, dtype=np.int32)
    small = ReadRequest(peer="source", block_bytes=4096, local_slots=every[:1], remote_slots=every[:1])
    transport.read_and_wait(small, 30.0)
    handle = 0
    assert arena.num_bytes == BLOCK_BYTES * NUM_BLOCKS
    pipe.send_bytes(b"ready")
    while True:
        command = pipe.recv_bytes()
        if command == b"r":
            transport.read_and_wait(small, 30.0)
            pipe.send_bytes(b"done")
        elif command == b"own":
            seconds = []
            for _ in range(ROUNDS):
                started_s = time.perf_counter()
                transport.read_and_wait(small, 30.0)
                seconds.append(time.perf_counter() - started_s)
            pipe.send_bytes(json.dumps(seconds).encode())
        elif command == b"s":
            request = ReadRequest(peer="source", block_bytes=BLOCK_BYTES, local_slots=every, remote_slots=every)
            handle = transport.post(request)
            time.sleep(0.3)
            running = transport.poll(handle) is ReadState.RUNNING
            pipe.send_bytes(b"running" if running else b"finished")
        elif command == b"d":
            transport._agent.releaseXferReq(handle)
            pipe.send_bytes(b"dropped")


def _start(lane: str, arena_fd: int) -> tuple[Any, Connection, Any, Connection]:
    here, there = SPAWN.Pipe()
    src = SPAWN.Process(target=source, args=(there, lane))
    src.start()
    if not here.poll(60.0):
        raise TimeoutError("the source did not start")
    peer = here.recv()
    mine, theirs = SPAWN.Pipe()
    dst = SPAWN.Process(target=reader, args=(theirs, lane, (os.getpid(), arena_fd), peer))
    dst.start()
    if not mine.poll(60.0) or mine.recv_bytes() != b"ready":
        raise TimeoutError("the reader did not start")
    return src, here, dst, mine


def _end(*processes: Any) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.join(10.0)


def measure_hop(lane: str) -> dict[str, Any]:
    """Return p50 of one 4 KiB READ posted by the asking process, and asked of another over a Unix socket."""
    arena = create_arena(BLOCK_BYTES * NUM_BLOCKS)
    src, _keep, dst, pipe = _start(lane, arena.fd)
    try:
        pipe.send_bytes(b"own")
        own = json.loads(pipe.recv_bytes())
        asked = []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            pipe.send_bytes(b"r")
            pipe.recv_bytes()
            asked.append(time.perf_counter() - started_s)
        inside, hop = statistics.median(own) * 1e6, statistics.median(asked) * 1e6
        return {
            "what": "hop",
            "lane": lane,
            "read_in_process_p50_us": round(inside, 1),
            "read_via_mover_p50_us": round(hop, 1),
            "hop_us": round(hop - inside, 1),
        }
    finally:
        _end(src, dst)
        arena.close()


def measure_abort(how: str) -> dict[str, Any]:
    """Return how many bytes were overwritten after the reader gave up, and how the source ended."""
    arena = create_arena(BLOCK_BYTES * NUM_BLOCKS)
    src, _keep, dst, pipe = _start("tcp", arena.fd)
    try:
        os.kill(src.pid, signal.SIGSTOP)
        pipe.send_bytes(b"s")
        state = pipe.recv_bytes().decode()
        if how == "drop the handle":
            pipe.send_bytes(b"d")
            pipe.recv_bytes()
        else:
            dst.kill()
            dst.join(10.0)
        slab = arena.bytes_view()
        slab[:] = 0xEE  # The slots are reused for something else.
        os.kill(src.pid, signal.SIGCONT)
        src.join(8.0)
        overwritten = int(np.count_nonzero(slab != 0xEE))
        del slab
        return {
            "what": "abort",
            "lane": "tcp",
            "how": how,
            "read_was": state,
            "bytes_overwritten_later": overwritten,
            "source_exit_code": src.exitcode,
        }
    finally:
        _end(src, dst)
        arena.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    arguments = parser.parse_args()
    rows = [measure_hop(lane) for lane in ("default", "tcp")]
    for how in ("drop the handle", "kill the reader's process"):
        rows += [measure_abort(how) for _ in range(TRIALS)]
    if arguments.json:
        print(as_document({**provenance(), "rows": rows}), end="")
    else:
        for row in rows:
            print(row)


if __name__ == "__main__":
    assert socket.AF_UNIX  # SPAWN.Pipe is a Unix socket pair here.
    main()
