"""Frames of a real cluster at work, recorded where they pass: what each role says, and what it is answered."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from unittest import mock

from kvstore.blocks.codec import encode
from kvstore.mover.messages import StageMade
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op
from kvstore.rpc.handoff_messages import AskStage, End, Soon, StageFound, WarmUp
from kvstore.rpc.messages import NOTIFICATION, Ask, AskLookup
from kvstore.rpc.server import ControlServer
from tests.kvstore.conftest import Cluster

#: So many different frames of one kind are kept.
_MOST_OF_A_KIND = 12


class Recorder:
    """Frames by who sends them: a role, or the answers to that role."""

    def __init__(self) -> None:
        self.said: dict[str, list[Message]] = defaultdict(list)
        self._num_of_kind: dict[tuple[str, Op, Flag], int] = defaultdict(int)

    def note(self, sender: str, message: Message) -> None:
        """Keep a frame, if few of its kind were kept."""
        kind = (sender, message.op, message.flag)
        if self._num_of_kind[kind] < _MOST_OF_A_KIND and message not in self.said[sender]:
            self._num_of_kind[kind] += 1
            self.said[sender].append(message)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note all that control servers of this process hear and say."""
        serve, send = ControlServer.serve, Connection.send

        def heard(server: ControlServer, connection: Connection, message: Message) -> None:
            role = connection.role
            serve(server, connection, message)
            self.note(role or connection.role or "stranger", message)

        def said(connection: Connection, op: Op, flag: Flag, request: int, payload: bytes, fds=()) -> bool:
            self.note(f"to {connection.role}", Message(op, flag, request, payload))
            return send(connection, op, flag, request, payload, fds)

        with mock.patch.object(ControlServer, "serve", heard), mock.patch.object(Connection, "send", said):
            yield


def record(cluster: Cluster) -> Recorder:
    """Have nodes "a" and "b" of a cluster do all that they can, and return what was said."""
    recorder = Recorder()
    with recorder.listening():
        here, there = cluster.worker("a", 16, seed=1), cluster.worker("b", 16, seed=2)
        hashes = cluster.hashes(6)
        here.save(hashes, range(6))
        there.client.lookup(hashes)
        there.load(hashes, range(6))
        here.load(hashes, range(6))
        with here.client.lease(hashes, ttl_s=0.5) as lease:
            lease.renew(0.5)
        here.client.unpin(here.client.pin(hashes, ttl_s=0.5))
        there.client.prefetch(cluster.hashes(6, seed=1)).result(10)
        for reader in (here, there):
            reader.client.fetch(here.client.publish(range(4), ttl_s=5.0), range(4)).result(10)
        here.client.withdraw(here.client.publish([1, 2], ttl_s=5.0))
        here.client.stats()
        cluster.nodes["a"].state.pool_service.clear(cluster.space.digest)
        there.save(cluster.hashes(2, seed=3), range(2))
        here.load(cluster.hashes(2, seed=3), range(2))
    _add_what_needs_gpus(recorder, cluster)
    return recorder


def _add_what_needs_gpus(recorder: Recorder, cluster: Cluster) -> None:
    """Frames of hand-offs between GPUs, and others that a healthy cluster says seldom."""
    key = bytes(range(32))
    epoch, chain = cluster.nodes["a"].state.epoch, cluster.hashes(3)
    stage = StageFound(1, 1, "u", b"handle", b"nobody", 4096, 0, 512, 80, 4)
    made = StageMade(1, b"nobody", 4096, 0, b"handle")
    end = encode(End(1 << 63 | 5, True))
    extra = {
        "client": [
            (Op.LOOKUP_ALL, encode(AskLookup(chain, 0.5, 0.01))), (Op.AWAIT_STORE, encode(Ask(chain, 0.5))),
            (Op.HANDOFF_STAGE, encode(AskStage("u", 4096, 512))), (Op.HANDOFF_WARM, encode(WarmUp(1, 1, "b"))),
            (Op.HANDOFF_SOON, encode(Soon("b", 1, 1, 1))), (Op.HANDOFF_PACKING, encode(key)), (Op.HANDOFF_END, end),
            (Op.LOOKUP, encode(AskLookup(chain, 0.5, 0.0))),
        ],
        "peer": [(Op.PEER_STAGES, b""), (Op.PEER_CLAIM_END, end), (Op.PEER_RELEASE, encode(1))],
        "mover": [
            (Op.MOVER_NOTIFICATIONS, encode(NOTIFICATION.pack(1, epoch, b"reader78"))), (Op.MOVER_STAGE, encode(made)),
            (Op.MOVER_SPILL, b""), (Op.MOVER_TERMINAL, encode(3)), (Op.MOVER_STATS, encode({"num_reads": 1})),
        ],
        "to peer": [(Op.PEER_STAGES, encode([stage]))],
    }  # fmt: skip
    for sender, frames in extra.items():
        flag = Flag.REPLY if sender.startswith("to ") else Flag.REQUEST
        for op, payload in frames:
            recorder.note(sender, Message(op, flag, 1, payload))
