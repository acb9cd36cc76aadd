"""The processes of a small cluster without Ray: directory, node stores and their movers, each told what to do.

    python processes.py directory FOLDER
    python processes.py store FOLDER NODE CONFIG
    python processes.py mover CONTROL_PATH NAME CONFIG WAIT

A mover connects to its store once there is no file WAIT, which is FOLDER/wait.

They are what the Ray actors wrap, so nothing here differs from a cluster but how processes find each other: by
files in FOLDER. Each reads commands from its standard input, one JSON object a line, and answers likewise.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

HOST = "127.0.0.1"


class Gates:
    """Places in the code at which a thread waits while the gate of that name is shut."""

    def __init__(self):
        self._changed = threading.Condition()
        self._shut, self._held = set(), set()

    def shut(self, name):
        with self._changed:
            self._shut.add(name)

    def open(self):
        with self._changed:
            self._shut.clear()
            self._changed.notify_all()

    def held(self):
        return sorted(self._held)

    def passing(self, name):
        with self._changed:
            while name in self._shut:
                self._held.add(name)
                self._changed.wait(30)
            self._held.discard(name)

    def before(self, owner, method, name):
        """Put a gate in front of a method of a class or object."""
        inner = getattr(owner, method)

        def gated(*args, **options):
            self.passing(name)
            return inner(*args, **options)

        setattr(owner, method, gated)


def serve(verbs):
    """Answer commands until the standard input ends."""
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"is": verbs[command.pop("do")](**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), flush=True)
    os._exit(0)


def write(path, value):
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.write_text(json.dumps(value))
    new.rename(path)


def address_in(path):
    from kvstore.errors import StoreNotRunning
    from kvstore.remote.peers import PeerAddress

    try:
        return PeerAddress(*json.loads(path.read_text()))
    except OSError as error:
        raise StoreNotRunning(f"wanted an address in {path}, got {error}") from error


def directory(folder):
    from kvstore.remote.directory import DirectoryServer

    address = DirectoryServer(HOST).address()
    write(Path(folder) / "directory", [address.host, address.port, address.token])
    serve({"ping": lambda: True})


def store(folder, node_id, config):
    import numpy as np

    from kvstore.blocks.chain import BlockHashes, decode_chain
    from kvstore.config import StoreConfig
    from kvstore.errors import PeerLost
    from kvstore.mover.keeper import MoverKeeper
    from kvstore.mover.transport import ReadRequest
    from kvstore.node.core import NodeCore
    from kvstore.remote.covered_read import CoveredRead
    from kvstore.remote.directory_link import Hints
    from kvstore.remote.messages import PeerLease
    from kvstore.remote.peers import Peer

    sys.setswitchinterval(1e-4)
    gates, children = Gates(), []
    gates.before(Hints, "locate", "ask")
    gates.before(Peer, "lease", "lease")
    gates.before(CoveredRead, "_on_done", "publish")
    here = Path(folder)

    class ChildMover:
        def __init__(self):
            name = f"{node_id}-{core.state.epoch.hex()}-{secrets.token_hex(3)}"
            self.process = subprocess.Popen(
                [sys.executable, __file__, "mover", core.control_path, name, config, str(here / "wait")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            children.append(self.process)

        def wait_started(self, timeout_s):
            deadline_s = time.monotonic() + timeout_s
            while not core.state.mover.wait_ready(0.02):
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise PeerLost(f"wanted a mover that runs, got {self.process.poll()}")

        def kill(self):
            self.process.kill()
            self.process.wait(10)

    def mover_gone():
        children[-1].wait(10)
        keeper.replace()

    def tell_mover(do_):
        command = {"do": do_, "name": "read"} if do_ == "shut" else {"do": do_}
        children[-1].stdin.write(json.dumps(command) + "\n")
        children[-1].stdin.flush()
        return json.loads(children[-1].stdout.readline())["is"]

    remembered = {}

    def remember(node, chain):
        """Lease blocks at a peer, and keep the lease and the description of its memory."""
        chain = decode_chain(bytes.fromhex(chain))
        peer = core.state.peers.get(node)
        size = core.state.pool_service.block_bytes[chain.namespace]
        wanted = PeerLease(chain=chain, block_bytes=size, slot_format=1, namespace_version=0, ttl_s=60.0, within_s=2.0)
        grant = peer.lease(peer.client, wanted)
        name, description = peer.transport(grant.mover_generation, 2.0)
        remembered.update(name=name, description=description, grant=grant, size=size, seed=chain.namespace)
        return {"epoch": grant.epoch.hex()}

    def read_as_remembered():
        """Read a block as described then; returns the class of the error, or nothing when it arrived."""
        random = BlockHashes(remembered["seed"], remembered["seed"], 0, secrets.token_bytes(32))
        ticket = core.pool.prepare_store(random, "old")
        ended, errors = threading.Event(), []

        def on_done(done, error):
            errors.append("" if error is None else type(error).__name__)
            if done.last:
                ended.set()

        request = ReadRequest(
            peer=remembered["name"], block_bytes=remembered["size"], local_slots=np.array(ticket.slots, np.int32),
            remote_slots=remembered["grant"].slots[:1],
        )  # fmt: skip
        core.state.mover.read(
            request, remembered["description"], on_done, chunk_ends=np.array([1], np.int32), timeout_s=3.0
        )
        assert ended.wait(10)
        core.pool.abort_store(ticket.write_id, "old")
        return errors[-1]

    core = NodeCore(
        node_id, StoreConfig.from_json(config), HOST, lambda node, within_s: address_in(here / node),
        lambda: address_in(here / "directory"), mover_gone,
    )  # fmt: skip
    keeper = MoverKeeper(
        node_id, ChildMover, core.state.mover.wait_ready, core.state.config.call_timeout_s, pause_s=0.0
    )
    keeper.start()
    address = core.peer_address()
    write(here / node_id, [address.host, address.port, address.token])
    serve({
        "path": lambda: core.control_path,
        "ready": lambda: core.state.mover.wait_ready(20),
        "stats": core.stats,
        "exits": lambda: [child.poll() for child in children[:-1]],
        "generation": lambda: core.state.mover.own.generation if core.state.mover.own else 0,
        "check": lambda: core.pool.check_integrity(),
        "forgive": lambda node: core.state.peers.succeeded(node),
        "usable": lambda node: core.state.peers.is_usable(node),
        "waiting": lambda: core.state.fetcher.flights.num_waiting,
        "remember": remember, "read_as_remembered": read_as_remembered,
        "release_as_remembered": lambda node: core.state.peers.get(node).release(remembered["grant"].lease_id),
        "shut": gates.shut, "open": gates.open, "held": gates.held, "mover": tell_mover,
    })  # fmt: skip


def mover(control_path, name, config, wait):
    from kvstore.actors.mover import Mover
    from kvstore.mover.nixl import NixlTransport

    gates = Gates()
    gates.before(NixlTransport, "poll", "read")
    while Path(wait).exists():
        time.sleep(0.01)
    Mover(control_path, name, config)
    serve({"shut": gates.shut, "open": gates.open, "held": gates.held})


if __name__ == "__main__":
    {"directory": directory, "store": store, "mover": mover}[sys.argv[1]](*sys.argv[2:])
