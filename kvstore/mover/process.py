"""The mover: the process of a node that owns NIXL's agent and moves bytes into the arena.

It holds no pool state. It is a separate process because NIXL can abort the process in which it runs, and because
killing that process is the only known way to stop an abandoned READ. The node store sends it requests over the
control socket. One thread drives NIXL; it sleeps in the kernel while nothing is in flight and no remote lease is open.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from dataclasses import asdict

from kvstore.blocks.codec import decode_count, decode_text, encode
from kvstore.errors import RegistrationFailed, TransferError
from kvstore.mover.messages import (
    MoverReady,
    decode_add_peer,
    decode_mover_read,
    decode_mover_wake,
    decode_new_stage,
    decode_slots,
    decode_spill,
)
from kvstore.mover.reads import Reads
from kvstore.mover.slabs import Slabs
from kvstore.mover.transport import Transport
from kvstore.rpc.framing import RECEIVE_BYTES, Decoder, Flag, Message, Op, pack_error, packets_of
from kvstore.rpc.messages import NOTIFICATION

logger = logging.getLogger(__name__)

_ABANDONED_POLL_S = 0.02
_NOTIFICATION_POLL_S = 0.002
#: How long the mover stays awake for an announced READ: waking up takes a tenth of the time of such a READ.
_AWAKE_S = 0.003
#: If no chunk of any READ arrived for this long, the mover polls less often: a peer may have stopped.
_STALLED_AFTER_S, _STALLED_POLL_S = 0.1, 0.001


class Mover:
    """Receives requests of one node store, has READs done, and answers.

    Args:
        sock: the SEQPACKET connection to the node store, owned by this object.
        transport: owned by this object; driven by `run`'s thread only.
        slabs: the same object, if it can make stages and copy out of them.
    """

    def __init__(self, sock: socket.socket, transport: Transport, slabs: Slabs | None = None) -> None:
        self._sock, self._transport, self.slabs = sock, transport, slabs
        self._decoder = Decoder()
        # Reused for each message: a new buffer would come from the kernel each time, page by page.
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.reads = Reads(transport, self.send)
        self._num_remote_leases = 0
        self.awake_until_s = 0.0

    def run(self, address: int) -> None:
        """Announce this mover to its store and serve until the store closes the connection.

        Raises:
            ProtocolError: the store sent an invalid message, so the two do not agree on the state of the arena.
                The caller must end this process, which ends its READs too.
        """
        self.send(Op.MOVER_READY, encode(MoverReady(self._transport.describe(), address)))
        try:
            while True:
                self._receive(self.pause_s())
                self.reads.advance(may_release=not self.awake_until_s)
                if self._num_remote_leases:
                    notes = [note for note in self._transport.notifications() if len(note) == NOTIFICATION.size]
                    if notes:
                        self.send(Op.MOVER_NOTIFICATIONS, encode(b"".join(notes)))
        except (OSError, EOFError) as error:
            logger.info("mover: the node store closed the connection (%s)", error)
        finally:
            self._sock.close()

    def pause_s(self) -> float:
        """Return how long `run` may sleep for a message; 0 while a READ moves bytes."""
        if self.reads.jobs:
            return 0.0 if time.monotonic() - self.reads.moved_s < _STALLED_AFTER_S else _STALLED_POLL_S
        if self.awake_until_s:
            if time.monotonic() < self.awake_until_s:
                return 0.0
            self.awake_until_s = 0.0
        if self._num_remote_leases:
            return _NOTIFICATION_POLL_S
        return _ABANDONED_POLL_S if self.reads.abandoned or self.reads.woken else 5.0

    def _receive(self, timeout_s: float) -> None:
        # Not select(): it cannot take a file descriptor above 1023.
        if not self._poll.poll(timeout_s * 1000):
            return
        data = self._received[: self._sock.recv_into(self._received)]
        if not data:
            raise EOFError("closed")
        message = self._decoder.packet(data)
        if message is not None:
            self._serve(message)

    def _serve(self, message: Message) -> None:
        op, payload = message.op, message.payload
        if op is Op.MOVER_READ:
            self.reads.add(decode_mover_read(payload))
        elif op is Op.MOVER_SOON:
            self.awake_until_s = time.monotonic() + _AWAKE_S
            self.reads.wake(payload)
        elif op is Op.MOVER_WAKE:
            self.reads.wake_by(decode_mover_wake(payload))
        elif op is Op.MOVER_EXPECT:
            self._num_remote_leases = decode_count(payload)
        elif op is Op.ATTACH:
            slots = decode_slots(payload)
            self._transport.set_slots(slots.slot_bytes, slots.num_slots)
        elif op is Op.MOVER_ADD_PEER:
            self.reads.add_peer(decode_add_peer(payload))
        elif op is Op.MOVER_FORGET_PEER:
            self.reads.forget_peer(decode_text(payload))
        elif op is Op.MOVER_STATS:
            answer = asdict(self._transport.totals - self.reads.woken_totals)
            self.send(op, encode(answer), Flag.REPLY, message.request)
        elif op in (Op.MOVER_STAGE, Op.MOVER_SPILL):
            self._answer_of_slabs(message)

    def _answer_of_slabs(self, message: Message) -> None:
        try:
            if self.slabs is None:
                raise RegistrationFailed("wanted a mover that can stage blocks on a GPU, got one that cannot")
            if message.op is Op.MOVER_STAGE:
                answer = encode(self.slabs.stage(decode_new_stage(message.payload)))
            else:
                self.slabs.spill(decode_spill(message.payload))
                answer = b""
        except TransferError as error:
            self.send(message.op, pack_error(error), Flag.ERROR, message.request)
        else:
            self.send(message.op, answer, Flag.REPLY, message.request)

    def send(self, op: Op, payload: bytes, flag: Flag = Flag.ONE_WAY, request: int = 0) -> None:
        """Send one message to the node store, in as many packets as it needs."""
        for packet in packets_of(Message(op, flag, request, payload)):
            self._sock.sendall(packet)
