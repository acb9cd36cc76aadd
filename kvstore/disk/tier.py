"""The disk tier of one node store (G3): what the store calls. docs/disk.md describes the files.

The blocks on disk are in a pool of their own, under the same rules as those in memory: leases, generations, eviction of
leaves before roots, clearing. Saves are written behind (kvstore.disk.writing), loads read blocks into slots of memory
(kvstore.disk.reader). The disk may fail, fill up or hang: then the tier is off, with a reason, and the rest goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from kvstore.blocks.chain import BlockHashes
from kvstore.config import StoreConfig
from kvstore.disk.folder import VERSIONS, Folder, open_folder, sizes_in
from kvstore.disk.places import Places, TierContext
from kvstore.disk.reader import READER, DiskRead, Reader
from kvstore.disk.records import place_bytes
from kvstore.disk.restore import restore_old
from kvstore.disk.room import Room
from kvstore.disk.threads import DiskThreads
from kvstore.disk.versions_file import VersionsKeeper, read_versions
from kvstore.disk.writing.admission import WriteBudget
from kvstore.disk.writing.write_back import WriteBack
from kvstore.disk.writing.writer import OWNER, Writer
from kvstore.errors import ConfigError, DiskUnavailable
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.make import disk_tenants
from kvstore.runtime import clock
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.life import MOST_LINES, log_life
from kvstore.runtime.rates import MeasuredRate

logger = logging.getLogger(__name__)

#: How long threads may take to end, and the blocks of memory to be written back, when a store ends.
_STOP_S, _WRITE_BACK_S = 2.0, 5.0
#: Blocks that may wait to be written, at most; a place in the queue costs some tens of bytes.
_MOST_QUEUED = 1 << 16


class DiskTier:
    """The blocks on this node's disk. Any thread may call; `attach`, `admit_old`, `wait_saved` and `stop` wait.

    The tier begins with `open`, which checks the path, and holds nothing until `attach` says how large slots are.
    Blocks of an earlier store are found after `admit_old`, which waits for the directory: a namespace may have been
    cleared while this node was away.

    Args:
        config, node_id: of the store, and of this node.
        versions_now: returns the versions of all namespaces that this node knows were cleared.

    Raises:
        ConfigError: the path cannot be used, or has too little room.
    """

    def __init__(self, config: StoreConfig, node_id: str, versions_now: Callable[[], dict[bytes, int]]) -> None:
        self._config = config
        self._folder: Folder = open_folder(config.disk_path, config.name, node_id, config.disk_capacity_bytes)
        try:
            #: What was cleared, as the last store on this folder knew it.
            self.old_versions = read_versions(self._folder.path / VERSIONS)
            self._num_other_bytes = sum(num_bytes for _, num_bytes in sizes_in(self._folder.path).values())
        except (OSError, ConfigError) as error:
            self._folder.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"disk_path: wanted a readable file, got {error}; give another path") from error
        self._stopping, self._has_stopped = threading.Lock(), threading.Event()
        limit, path = LogLimit(at_once=MOST_LINES), self._folder.path
        self._say_off = partial(log_life, "disk_off", level=logging.ERROR, limit=limit, path=path)
        self._say_on = partial(log_life, "disk_on", limit=limit, path=path)
        self._versions = VersionsKeeper(self._folder.path / VERSIONS, versions_now, self.old_versions)
        #: Why the tier stays off for good.
        self.why_off = ""
        self.pool = Pool(0)
        self._is_admitted = self._is_stopped = False
        self._context: TierContext | None = None
        self._writer: Writer | None = None
        self._back: WriteBack | None = None
        self._reader: Reader | None = None
        self._threads: DiskThreads | None = None
        #: Blocks of earlier stores, and the rate of loads of this node.
        self.num_restored, self.rate = 0, MeasuredRate()
        self._beginning = threading.Lock()  # Files are opened, or read: they must not be closed meanwhile.
        #: Set when `attach` was called for the present slots of memory, and has ended.
        self.has_begun = threading.Event()
        # At once: a clearing before the first client has to last, too.
        self._versions.thread.start()

    def attach(
        self,
        memory_pool: Pool,
        memory: memoryview,
        slot_bytes: int,
        presence: PresenceCounts,
        num_bytes_of: Callable[[bytes], int],
        version_of: Callable[[bytes], int],
        changed: Callable[[], object],
    ) -> None:
        """Open the files of a size of slots, and wait for it. If the disk refuses, `why_off` says why the tier is off.

        Args:
            memory_pool: of the arena; another one if that was divided again, while nothing was in it.
            memory: the arena.
            slot_bytes: of its slots, a multiple of `PAGE_BYTES`.
            presence: counts the first blocks of chains on this node.
            num_bytes_of: returns the bytes of a block of a namespace.
            version_of: returns the version of a namespace's last clearing.
            changed: called when blocks became findable on the disk, or no longer are.
        """
        with self._beginning:
            if self._is_stopped or (self._context is not None and slot_bytes <= self._context.slots.slot_bytes):
                return
            self.pool, self._is_admitted, self.why_off = Pool(0), False, ""
            if self._context is not None and self._threads is not None:
                if self._threads.stop(_STOP_S):  # Nothing was in memory, so nothing is read or written.
                    self._context.room.close()
                self._context = None
            folder = self._folder
            try:
                room = Room(folder.path, folder.tier_id, slot_bytes, self._config.disk_capacity_bytes)
            except (OSError, ConfigError) as error:
                self.why_off = f"the disk tier cannot begin: {error}"
                self._say_off(reason=self.why_off)
                return
            num_slots = room.num_slots
            tenants = disk_tenants(self._config.tenants, num_slots, place_bytes(slot_bytes))
            pool = Pool(num_slots, presence=presence, has_roots=self._config.num_directory_shards > 1, tenants=tenants)
            self._context = TierContext(
                tier_id=folder.tier_id,
                memory_pool=memory_pool,
                memory=memory,
                disk_pool=pool,
                places=Places(num_slots),
                room=room,
                slots=room.slots,
                index=room.index,
                num_bytes_of=num_bytes_of,
                version_of=version_of,
                changed=changed,
            )
            threads = self._threads = DiskThreads(
                self._write_some, self._config.disk_timeout_s, on_off=self._went_off, on_again=self._say_on
            )
            self._reader = Reader(self._context, self._threads)
            self._writer = Writer(
                self._context,
                min(_MOST_QUEUED, max(memory_pool.num_slots, 1)),
                self._config.disk_min_uses,
                self._config.disk_write == "through",
                WriteBudget(self._config.disk_write_bytes_per_day, clock.now_s()),
                self._config.disk_sync,
                self._versions.save,
                self._threads.write_soon,
                lambda: threads.is_off,
                threads.answered,
            )
            if self._config.disk_write == "back":
                self._back = WriteBack(self._context, self._writer, threads.write_soon, lambda: self.is_off)
            self.pool = pool
            self._threads.start()

    def wait_begun(self, answer: dict[str, int]) -> dict[str, int]:
        """Return this when the tier has begun, or after a while: the first blocks are stored there, too."""
        self.has_begun.wait(min(self._config.disk_timeout_s, self._config.call_timeout_s / 2))
        return answer

    def admit_old(self) -> int:
        """Make the blocks of an earlier store findable, and begin to write new ones. Return the number of the first.

        Called once, on a thread that may wait for the disk, when this node knows what was cleared while it was away.
        """
        with self._beginning:
            context = self._context
            if context is None or self._is_admitted or self._is_stopped:
                return 0
            try:
                self.num_restored = restore_old(context, self._config.tenants)
            except Exception as error:
                self.why_off = f"the index of the disk tier cannot be read: {error}"
                logger.debug("%s", self.why_off, exc_info=True)
                self._say_off(reason=self.why_off)
                return 0
            self._is_admitted = True
        self._say_on(num_restored=self.num_restored)
        if self.num_restored:
            context.changed()
        if self._threads is not None:
            self._threads.write_soon()
        return self.num_restored

    def offer(self, namespace: bytes, slots: list[int], owner: str) -> None:
        """Note that blocks of memory became readable. Under the memory pool's lock, so nothing here waits."""
        if self._writer is not None:
            self._writer.offer(namespace, slots, is_on_disk=owner.startswith(READER))

    def used(self, namespace: bytes, slots: list[int], is_use: bool) -> None:
        """Note that blocks of memory were touched, as `EvictionPolicy.touched`. Under the memory pool's lock."""
        if self._writer is not None:
            self._writer.used(namespace, slots, is_use)

    @property
    def can_write_back(self) -> bool:
        """Whether blocks that are about to be evicted are written before."""
        return self._back is not None and not self.is_off

    def write_back(self, num_blocks: int, timeout_s: float) -> int | None:
        """Have the next victims of memory written and evicted; see `WritesBack` in kvstore.pool.reclaim."""
        return None if self._back is None else self._back.write_back(num_blocks, timeout_s)

    def evicted(self, hashes: list[bytes], num_low: int) -> None:
        """Count blocks that were evicted before they were written back. Under the memory pool's lock."""
        if self._back is not None:
            self._back.evicted(hashes, num_low)

    @property
    def is_off(self) -> bool:
        """Whether blocks of the disk are misses now."""
        return not self._is_admitted or self._is_stopped or self._threads is None or self._threads.is_off

    def lookup(self, chain: BlockHashes) -> int:
        """Return how many leading blocks of a run are on the disk; 0 while it is off. Changes nothing."""
        return 0 if self.is_off else self.pool.lookup(chain)

    def read(
        self,
        chain: BlockHashes,
        on_ready: Callable[[int, int], object],
        on_claim: Callable[[list[bytes]], object] = lambda hashes: None,
        num_bytes: int = 0,
        tenant: str = "",
    ) -> DiskRead | None:
        """Begin to read the leading blocks of a run into memory; see `Reader.begin`.

        Raises:
            DiskUnavailable: the disk is off.
            PoolExhausted: no slot of memory is free for a block.
        """
        if self._reader is None or self.is_off:
            raise DiskUnavailable(f"the disk tier is off: {self.reason or 'it has not begun'}")
        return self._reader.begin(chain, on_ready, on_claim, num_bytes, tenant)

    def clear(self, namespace: bytes) -> bool:
        """Make all blocks of a namespace's group unfindable on the disk; return True.

        Called under the lock of the memory's pool, in the step that clears there: then no block that is on its way
        from one to the other stays (kvstore.disk.writing.writer, kvstore.disk.reader).
        """
        if self.pool.num_slots:
            self.pool.begin_clear(namespace)
        self._versions.save_soon()
        return True

    def wait_saved(self, timeout_s: float) -> bool:
        """Wait until the disk keeps the clearings that are known now; False when it did not in that time."""
        return self._versions.wait(self._versions.save_soon(), timeout_s)

    def num_held(self) -> int:
        """Return how many leases of the memory's pool the writing holds; a disk that hangs keeps them."""
        return 0 if self._context is None else self._context.memory_pool.num_leases(OWNER)

    def sweep(self) -> None:
        """Give some slots of cleared blocks back."""
        self.pool.sweep()

    def has_cleared(self) -> bool:
        """Return whether `sweep` has something to do."""
        return self.pool.has_cleared()

    @property
    def reason(self) -> str:
        """Why the disk is off, or was off last; "" if it never was."""
        if self.why_off or self._threads is None:
            return self.why_off
        return self._threads.reason

    def _write_some(self) -> bool:
        if self._writer is None or not self._is_admitted:
            return False  # `admit_old` asks again.
        return self._writer.write_some() or (self._back is not None and self._back.write_some())

    def _went_off(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.drop_all("off")
        if self._back is not None:
            self._back.forget()
        if self._reader is not None:
            self._reader.give_up()
        self._say_off(reason=reason)

    def stats(self) -> dict[str, Any]:
        """Return the state and the counts."""
        context, writer, reader, threads = self._context, self._writer, self._reader, self._threads
        result: dict[str, Any] = {
            "path": str(self._folder.path),
            "is_off": self.is_off,
            "reason": self.reason,
            "num_other_bytes": self._num_other_bytes if context is None else context.room.num_other_bytes,
            "num_restored": self.num_restored,
            "read_gb_per_s": round(self.rate.bytes_per_s / 1e9, 3),
        }
        if context is None or writer is None or reader is None or threads is None:
            return result
        with reader.lock:
            counts = asdict(reader.counts)
        return {
            **result,
            "is_direct": context.slots.is_direct,
            "num_queued": writer.num_queued,
            "num_unwritten": writer.num_unwritten() + (0 if self._back is None else self._back.num_writing),
            "num_written": writer.counts.num_written,
            "num_written_bytes": writer.counts.num_bytes,
            "dropped": dict(writer.counts.dropped),
            **counts,
            "num_trips": threads.breaker.num_trips,
            "pool": asdict(self.pool.stats()),
        }

    def stop(self) -> None:
        """End the threads and let the folder go. Writes back for some seconds before; another call waits for that."""
        if not self._stopping.acquire(blocking=False):  # For good.
            self._has_stopped.wait(_WRITE_BACK_S + 2 * _STOP_S)  # The caller closes the memory next.
            return
        try:
            self._stop()
        finally:
            self._has_stopped.set()

    def _stop(self) -> None:
        if self._back is not None and (num_left := self._back.write_rest(_WRITE_BACK_S)):
            logger.warning("%d blocks of memory were not written back at the stop", num_left)
        self._is_stopped = True
        until_s = clock.now_s() + _STOP_S
        has_ended = self._beginning.acquire(timeout=_STOP_S)
        if has_ended:
            self._beginning.release()  # What begins from now on does nothing.
        for stop in (self._versions.close, self._threads.stop if self._threads is not None else lambda left_s: True):
            has_ended &= stop(max(until_s - clock.now_s(), 0.0))
        if not has_ended:
            logger.warning("the disk does not answer; its folder stays locked until this process ends")
            return
        if self._context is not None:
            self._context.room.close()
        self._folder.close()
