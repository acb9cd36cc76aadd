"""Define all errors of raykv, in one tree.

KVStoreError
├── ConfigError              settings that cannot work
│   ├── IncompatibleStore    a running store has another protocol version or configuration
│   └── UnsupportedModel     the KV of an engine's model cannot be shared yet
├── InvalidRequest           an argument of one call is wrong; nothing was changed
│   ├── NamespaceMismatch    hashes of one namespace were used with a client of another
│   ├── ChainBroken          hashes are not one contiguous run of a chain
│   ├── StaleTicket          the ticket is of an earlier epoch of the store, or generation of its slots
│   ├── StaleVersion         a namespace has been cleared again since
│   └── ForkedClient         a client, lease, job or Ray was used in a fork of the process that made it
├── LayoutMismatch           tensors or peers hold KV in another layout than agreed
├── PoolExhausted            no slot is available now
├── BlockNotFound            a named block is not resident
├── LeaseError
│   ├── LeaseExpired         the deadline passed
│   └── LeaseReleased        the lease was released before
├── StoreUnavailable         the node store cannot be asked
│   ├── StoreNotRunning      no store runs under that name or address
│   ├── WrongCluster         the store is in another Ray cluster than this process
│   ├── StoreDraining        the store runs but grants nothing any more
│   └── StoreBusy            too much of one kind is under way already: requests, or a restart
├── TransferError            bytes did not arrive
│   ├── TransferTimeout      not terminal in time; the destination is quarantined
│   │   └── JobRunning       a save or load is not done yet; it continues
│   ├── PeerLost             the other side is gone
│   │   └── NotAsked         the connection was closed before a question was sent
│   ├── RegistrationFailed   memory could not be registered for transfer
│   └── DiskUnavailable      the disk tier is off: the disk failed, is full or hangs
├── JobAbandoned             the owner abandoned a save or load
├── ProtocolError            bytes on a control connection are not of this protocol
└── KernelError              copies of a GPU's cache failed
    └── CopyStuck            the device did not finish the copies

Errors cross process boundaries, so every class takes positional arguments only and
can be pickled. A message says what was wanted, what was got and what to do.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error that raykv raises on purpose."""


class ConfigError(KVStoreError):
    """A setting cannot work; nothing was started or changed."""


class IncompatibleStore(ConfigError):
    """A running store has another protocol version or configuration than the caller's."""


class UnsupportedModel(ConfigError):
    """The KV of an engine's model cannot be shared yet. Its kind of attention, cache or adapter is not supported."""


class InvalidRequest(KVStoreError):
    """An argument of one call is wrong; the call changed nothing."""


class NamespaceMismatch(InvalidRequest):
    """Block hashes are of another namespace than the client that got them."""


class ChainBroken(InvalidRequest):
    """Block hashes are not one contiguous run of a chain that the store can attach."""


class StaleTicket(InvalidRequest):
    """A generation or epoch is not the present one; nothing was changed. Prepare the store again."""


class StaleVersion(InvalidRequest):
    """A clearing is not later than the last one, or blocks are from before it; nothing was changed."""

    #: Blocks that went with this very clearing when another process reported it; each is told to one caller only.
    num_cleared: int = 0


class ForkedClient(InvalidRequest):
    """A client, a lease, a job or Ray was used in a fork of the process that made it; nothing changed."""


class LayoutMismatch(KVStoreError):
    """Tensors, or a peer, hold KV in a layout that cannot be copied as asked."""


class PoolExhausted(KVStoreError):
    """No slot is available, or a bound on leases, pins or writes is reached; release leases or add capacity."""


class BlockNotFound(KVStoreError):
    """A block that the call requires is not resident."""


class LeaseError(KVStoreError):
    """A lease cannot be used."""


class LeaseExpired(LeaseError):
    """The deadline of the lease has passed; its blocks may be gone."""


class LeaseReleased(LeaseError):
    """The lease was released before."""


class StoreUnavailable(KVStoreError):
    """A node store cannot be asked right now."""


class StoreNotRunning(StoreUnavailable):
    """No store runs under that name or address; start one with `kvstore.start()`."""


class WrongCluster(StoreUnavailable):
    """This process is connected to another Ray cluster than the requested one; nothing was done there."""


class StoreDraining(StoreUnavailable):
    """The node store is being drained and grants nothing any more."""


class StoreBusy(StoreUnavailable):
    """The store runs, but has too much of one kind to do, like blocking requests or another restart; try again."""


class TransferError(KVStoreError):
    """Bytes did not arrive; no byte of the destination may be used."""


class TransferTimeout(TransferError):
    """A transfer was not terminal in time; its destination is quarantined until the transfer ends."""


class JobRunning(TransferTimeout):
    """A save or load is not done yet; it continues. Wait again, or abandon it."""


class PeerLost(TransferError):
    """The process on the other side of a transfer or a call is gone."""


class NotAsked(PeerLost):
    """The connection was closed before this question's turn; nothing was sent."""


class RegistrationFailed(TransferError):
    """Memory could not be registered with CUDA or with NIXL."""


class DiskUnavailable(TransferError):
    """The disk tier is off: the disk failed, is full or does not answer. Its blocks are misses until it is on."""


class JobAbandoned(KVStoreError):
    """The owner abandoned a save or load; the job does not touch the engine's blocks any more."""


class ProtocolError(KVStoreError):
    """Bytes on a control connection are not of this protocol; the connection is closed."""


class KernelError(KVStoreError):
    """Copies of a GPU's cache could not be prepared, or failed; they do not touch any memory now."""


class CopyStuck(KernelError):
    """The device did not finish copies: they may still touch blocks and slots. End the process."""


def all_error_types() -> dict[str, type[KVStoreError]]:
    """Return every error class of the tree by name; messages send an error as its name."""
    return {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, KVStoreError)}
