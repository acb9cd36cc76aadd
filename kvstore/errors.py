"""All errors of raykv, in one tree.

KVStoreError
├── ConfigError              settings that cannot work
│   ├── IncompatibleStore    a running store has another protocol version or configuration
│   └── UnsupportedModel     an engine's model whose KV cannot be shared yet
├── InvalidRequest           an argument of one call is wrong; nothing was changed
│   ├── NamespaceMismatch    hashes of one namespace used with a client of another
│   ├── ChainBroken          hashes are not one contiguous run of a chain
│   ├── StaleTicket          slots of an earlier life of the store or of the slots
│   ├── StaleVersion         a namespace has been cleared again since
│   └── ForkedClient         a client, lease, job or Ray used in a fork of the process that made it
├── LayoutMismatch           tensors or peers hold KV in another layout than agreed
├── PoolExhausted            no slot can be had now
├── BlockNotFound            a block that was named is not resident
├── LeaseError
│   ├── LeaseExpired         the deadline passed
│   └── LeaseReleased        released before
├── StoreUnavailable         the node store cannot be asked
│   ├── StoreNotRunning      nothing runs under that name or address
│   ├── WrongCluster         it is in another Ray cluster than this process
│   ├── StoreDraining        it runs but grants nothing any more
│   └── StoreBusy            too much of a kind waits there already
├── TransferError            bytes did not arrive
│   ├── TransferTimeout      not terminal in time; the destination is quarantined
│   │   └── JobRunning       a save or load is not done yet; it goes on
│   ├── PeerLost             the other side is gone
│   │   └── NotAsked         its connection was closed before a question's turn came
│   └── RegistrationFailed   memory could not be registered for transfer
├── JobAbandoned             the owner gave a save or load up
├── ProtocolError            bytes on a control connection that are not ours
└── KernelError              copies of a GPU's cache failed
    └── CopyStuck            the device did not come to an end with them

Errors cross process boundaries, so every class takes positional arguments only and
survives pickling. A message says what was wanted, what was got and what to do.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error that raykv raises on purpose."""


class ConfigError(KVStoreError):
    """A setting cannot work; nothing was started or changed."""


class IncompatibleStore(ConfigError):
    """A running store has another protocol version or configuration than asked for."""


class UnsupportedModel(ConfigError):
    """The KV of an engine's model cannot be shared yet: another kind of attention or cache, or an adapter."""


class InvalidRequest(KVStoreError):
    """An argument of one call is wrong; the call changed nothing."""


class NamespaceMismatch(InvalidRequest):
    """Block hashes belong to another namespace than the client they were given to."""


class ChainBroken(InvalidRequest):
    """Block hashes are not one contiguous run of a chain that the store can attach."""


class StaleTicket(InvalidRequest):
    """A generation or epoch is not the present one; nothing was changed. Prepare the store again."""


class StaleVersion(InvalidRequest):
    """A clearing that is not later than the last one, or blocks from before it; nothing was changed."""


class ForkedClient(InvalidRequest):
    """A client, a lease, a job or Ray was used in a fork of the process that made it; nothing changed."""


class LayoutMismatch(KVStoreError):
    """Tensors, or a peer, hold KV in a layout that cannot be copied as asked."""


class PoolExhausted(KVStoreError):
    """Every slot is pinned, being written or quarantined; release leases or add capacity."""


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
    """This process is connected to another Ray cluster than the one that was meant; nothing was done there."""


class StoreDraining(StoreUnavailable):
    """The node store is being drained and grants nothing any more."""


class StoreBusy(StoreUnavailable):
    """The node store runs, but too much that blocks waits there already; nothing was begun, try again soon."""


class TransferError(KVStoreError):
    """Bytes did not arrive; no byte of the destination may be used."""


class TransferTimeout(TransferError):
    """A transfer was not terminal in time; its destination is quarantined until it is."""


class JobRunning(TransferTimeout):
    """A save or load is not done yet; it goes on. Wait again, or abandon it."""


class PeerLost(TransferError):
    """The process on the other side of a transfer or a call is gone."""


class NotAsked(PeerLost):
    """The connection was closed before its turn came, by a question of another thread that failed; nothing was sent."""


class RegistrationFailed(TransferError):
    """Memory could not be registered with the transfer engine."""


class JobAbandoned(KVStoreError):
    """The owner of a save or load gave it up; it touches the engine's blocks no more."""


class ProtocolError(KVStoreError):
    """Bytes on a control connection are not of this protocol; the connection is closed."""


class KernelError(KVStoreError):
    """Copies of a GPU's cache could not be prepared, or failed; they touch nothing any more."""


class CopyStuck(KernelError):
    """The device did not come to an end with copies: they may still touch blocks and slots. End the process."""


def all_error_types() -> dict[str, type[KVStoreError]]:
    """Return every error class of the tree by name, so that errors can cross a wire safely."""
    found: dict[str, type[KVStoreError]] = {}
    pending: list[type[KVStoreError]] = [KVStoreError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found
