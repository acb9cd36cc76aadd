"""One of two rank processes of the soak: both save the same chains in parts, and any of them may be killed.

They need no word of each other: the time tells both which chain is next. Weights change under them. A block that
mixes two versions, or two chains, is wrong bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from kvstore.blocks.hashing import BlockHashes
from kvstore.errors import ChainBroken, KVStoreError, StoreUnavailable, TransferError
from tests.soak.engine import LAYOUTS, POISON, Engine
from tests.soak.plan import chains, ranks_space
from tests.soak.settings import OPERATION_S, REOPEN_S, WorkerSettings
from tests.soak.voice import Voice
from tests.soak.weights import Weights

#: Each chain is saved for so long, and a rank that was not there comes in with the next one.
_TURN_S = 0.25
_NUM_CHAINS, _NUM_BLOCKS = 10, 12
_SAVED, _LOADED = range(_NUM_BLOCKS), range(_NUM_BLOCKS, 2 * _NUM_BLOCKS)


class RankWorker:
    """Saves its part, loads what both saved: its own part, and as an engine with all heads.

    Args:
        settings: of this life.
        driver: is told.
    """

    def __init__(self, settings: WorkerSettings, driver: Connection) -> None:
        self._settings, self._driver = settings, driver
        name = f"rank {settings.rank} of node {settings.node}, life {settings.life}"
        self._voice = Voice(name, settings.log_file, driver)
        self._weights = Weights(settings.weights_file)
        self._chains = [chain[:_NUM_BLOCKS] for chain in chains(ranks_space())[:_NUM_CHAINS]]
        self._engines: list[Engine] = []

    def run(self) -> None:
        """Work until the driver says that it is enough, or is gone."""
        self._open()
        while not self._driver.poll():
            turn = int(time.monotonic() / _TURN_S)
            self._voice.note(f"turn {turn}")
            began_s = time.monotonic()
            try:
                self._save(self._chains[turn % _NUM_CHAINS])
                for engine in self._engines:
                    self._load(engine, self._chains[(turn - 1) % _NUM_CHAINS])
            except ChainBroken as error:
                self._voice.finding(f"a save from the root: {error}")
            except KVStoreError as error:
                self._voice.counts["errors", "ranks", type(error).__name__] += 1
                if not isinstance(error, StoreUnavailable | TransferError):
                    self._voice.finding(f"a rank was told {type(error).__name__}: {error}")
                self._close()
                self._open()
            self._voice.timed("turn of a rank", time.monotonic() - began_s)
            self._voice.report()
            time.sleep(max(0.0, (turn + 1) * _TURN_S - time.monotonic()))
        self._driver.recv()
        self._close()
        self._voice.report(now=True)

    def _save(self, run: BlockHashes) -> None:
        engine = self._engines[0]
        with self._weights.using() as version:
            engine.cache.write(run, _SAVED, version)
            job = engine.client.save(run, _SAVED)
        result = job.result(OPERATION_S)
        self._voice.counts["operations", "save of a part"] += 1
        self._voice.counts["blocks", "written in parts"] += result.num_written

    def _load(self, engine: Engine, run: BlockHashes) -> None:
        engine.cache.fill(_LOADED, POISON)
        oldest = self._weights.oldest
        result = engine.client.load(run, _LOADED).result(OPERATION_S)
        usable, ids = run[: result.num_blocks], _LOADED[: result.num_blocks]
        self._voice.counts["operations", "load of parts"] += 1
        self._voice.counts["blocks", "verified"] += len(ids)
        versions = range(oldest, self._weights.newest + 1)
        if engine.cache.version_of(usable, ids, versions) is None:
            found = self._versions(engine, usable, ids)
            self._voice.finding(f"WRONG BYTES in parts: wanted one version of {versions}, got {found}; {result}")

    def _versions(self, engine: Engine, run: BlockHashes, ids: Sequence[int]) -> list[int | None]:
        known = range(self._weights.newest + 1)
        return [engine.cache.version_of(run[i : i + 1], ids[i : i + 1], known) for i in range(len(ids))]

    def _open(self) -> None:
        deadline_s = time.monotonic() + REOPEN_S
        layout = LAYOUTS[self._settings.life % len(LAYOUTS)]
        while True:
            try:
                path = self._settings.path_files[self._settings.node].read_text()
                for rank in (self._settings.rank, None):
                    self._engines.append(Engine(path, ranks_space(), layout, len(_SAVED) + len(_LOADED), rank))
                return
            except (StoreUnavailable, TransferError) as error:
                self._close()
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"no store to talk to for {REOPEN_S} s: {error}") from error
                time.sleep(0.1)

    def _close(self) -> None:
        while self._engines:
            self._engines.pop().close()
