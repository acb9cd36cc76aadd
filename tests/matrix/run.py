"""Run cases of the matrix: two Ray nodes, a store with and one without a disk, a prefill and two decode workers."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kvstore
from tests.matrix.cases import Case

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START_S = 120.0
CALL_S = 60.0
BLOCK_SIZE = 32
NUM_NEW_TOKENS = 10
#: Fewer blocks than the prompts of a case and the filler have.
SMALL_BYTES = 1 << 20
NUM_FILLER_TOKENS = 1400
#: So few that pairs of tokens come again, and drafts can be made.
NUM_WORDS = 24
SOURCES = ("engine", "copied", "memory", "disk", "peer", "handoff", "computed")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a case came to.

    Args:
        case: the case.
        num_requests: answers that were compared.
        tokens: of the prompts, by where their KV came from; those of the store and of hand-offs in whole blocks.
        num_drafted: tokens that were guessed.
        num_accepted: of them, those that were right.
        num_blocks_read: blocks that the nodes read from their disks. A peer's disk may be faster than the own one; then
            `tokens` has them as the peer's.
        problems: what is wrong.
    """

    case: Case
    num_requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    num_drafted: int = 0
    num_accepted: int = 0
    num_blocks_read: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "tokens": {source: self.tokens[source] for source in SOURCES}}


class Worker:
    """A process with one engine at a time."""

    def __init__(self, examples: str) -> None:
        sys.path.insert(0, examples)
        self._engine: Any = None

    def build(self, kind: str, store: Any, **options: Any) -> None:
        import demo_engine

        self.close()
        self._engine = getattr(demo_engine, kind)(store, demo_engine.EngineOptions(**options))

    def do(self, verb: str, *args: Any) -> Any:
        answer = getattr(self._engine, verb)(*args)
        self._engine.cache.index.check_integrity()
        return answer

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


class Fleet:
    """The workers and stores that all cases share."""

    def __init__(self, stores: dict[str, Any], nodes: list[str], device: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._get, self._stores, self._device, self._num_cases = ray.get, stores, device, 0
        places = [nodes[0], nodes[1], nodes[1]]
        self._workers = [
            ray.remote(Worker)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(str(EXAMPLES))
            for node in places
        ]

    def run(self, case: Case) -> Outcome:
        """Serve the requests of a case, and compare every answer."""
        self._num_cases += 1
        store, salt = self._stores.get(case.tiers), f"case {self._num_cases}".encode()
        prefill, *decoders = self._workers[: 1 + case.num_decoders]
        options = {
            "model": case.model,
            "size": "tiny",
            "page_size": case.page_size,
            "block_size": BLOCK_SIZE,
            "salt": salt,
            "device": self._device,
            "num_window_tokens": 1024,
        }
        drafts = {"num_draft_tokens": case.num_draft_tokens}
        building = [decoder.build.remote("DecodeWorker", store, **options, **drafts) for decoder in decoders]
        if case.transfer != "none":
            building.append(prefill.build.remote("PrefillWorker", store, **options))
        self._get(building, timeout=START_S)
        outcome, has_room, num_before = Outcome(case=case), False, self._num_blocks_read()
        for prompts in rounds(case.num_decoders):
            if prompts is None:
                self._make_room(case, decoders, prefill)
                has_room = True
                continue
            if has_room and case.tiers == "disk" and case.transfer == "peer":
                given = [None] * len(
                    prompts
                )  # A prefill would bring the blocks to its memory, from where loads are fast.
            else:
                given = [self._prefilled(case, prefill, prompt) for prompt in prompts]
            rows = self._answers(decoders, prompts, given)
            for prompt, row, ticket in zip(prompts, rows, given, strict=True):
                self._count(outcome, prompt, row)
                if ticket is not None and not row["used_ticket"]:
                    self._get(prefill.do.remote("withdraw", ticket, prompt), timeout=CALL_S)
        self._get([worker.close.remote() for worker in (prefill, *decoders)], timeout=CALL_S)
        outcome.num_blocks_read = self._num_blocks_read() - num_before
        outcome.problems += missing(outcome)
        return outcome

    def _prefilled(self, case: Case, prefill: Any, prompt: list[int]) -> Any:
        """Let the prefill worker do its part; returns the ticket of a hand-off."""
        if case.transfer == "none":
            return None
        verb = "prefill" if case.transfer == "peer" else "prefill_and_hand_off"
        made = self._get(prefill.do.remote(verb, prompt), timeout=CALL_S)
        return None if case.transfer == "peer" else made

    def _answers(self, decoders: list[Any], prompts: list[list[int]], tickets: list[Any]) -> list[dict[str, Any]]:
        """Let all decoders answer at the same time, each its own prompt."""
        rows = []
        for decoder, prompt, ticket in zip(decoders, prompts, tickets, strict=True):
            decoder.do.remote("answer_without_cache", prompt, NUM_NEW_TOKENS)
            rows.append(decoder.do.remote("answer", prompt, NUM_NEW_TOKENS, False, ticket))
        return list(self._get(rows, timeout=CALL_S))

    def _make_room(self, case: Case, decoders: list[Any], prefill: Any) -> None:
        """Evict the pages of all engines, and with small memories also their blocks: then they are on disk alone."""
        if case.tiers == "disk":
            self._wait_written(self._stores["disk"])
            rng = random.Random(self._num_cases)
            filler, other = ([rng.randrange(4096) for _ in range(NUM_FILLER_TOKENS)] for _ in range(2))
            filling = [decoders[0].do.remote("serve", filler, 0)]
            if case.transfer == "peer":
                filling.append(prefill.do.remote("prefill", other))
            self._get(filling, timeout=CALL_S)
        self._get([decoder.do.remote("forget") for decoder in decoders], timeout=CALL_S)

    def _num_blocks_read(self) -> int:
        nodes = self._stores["disk"].stats()["nodes"].values()
        return sum(node["disk"].get("num_read", 0) for node in nodes)

    def _wait_written(self, store: Any) -> None:
        """Wait until all blocks of a store are on disk: what is evicted before its turn comes is lost."""
        deadline_s = time.monotonic() + CALL_S
        # A node that no client has used yet has nothing to write.
        while any(node["disk"].get("num_unwritten", 0) for node in store.stats()["nodes"].values()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"blocks are still to be written after {CALL_S:g} s")
            time.sleep(0.05)

    def _count(self, outcome: Outcome, prompt: list[int], row: dict[str, Any]) -> None:
        outcome.num_requests += 1
        outcome.num_drafted += row["num_drafted"]
        outcome.num_accepted += row["num_accepted"]
        is_handoff = row["route"] != ""
        brought = {
            "engine": row["num_tokens_engine"] - row["num_tokens_copied"],
            "copied": row["num_tokens_copied"],
            "memory": BLOCK_SIZE * (row["num_blocks_own"] - row["num_blocks_disk"]) * (not is_handoff),
            "disk": BLOCK_SIZE * row["num_blocks_disk"],
            "peer": BLOCK_SIZE * row["num_blocks_peer"] * (not is_handoff),
            "handoff": BLOCK_SIZE * (row["num_blocks_own"] + row["num_blocks_peer"]) * is_handoff,
            "computed": row["num_tokens_computed"],
        }
        outcome.tokens.update(brought)
        outcome.problems += [
            f"{name.removesuffix('_identical')} of a prompt of {len(prompt)} tokens differ: {brought}"
            for name in ("kv_identical", "logits_identical", "tokens_identical")
            if not row[name]
        ]
        if row["not_loaded_because"]:
            outcome.problems.append(f"not loaded: {row['not_loaded_because']}")


def rounds(num_decoders: int) -> Iterator[list[list[int]] | None]:
    """Yield what is served at the same time, a prompt for each decoder; None where pages are needed for others."""
    rng = random.Random(5)
    document = [rng.randrange(NUM_WORDS) for _ in range(150)]
    first, other = document + [7] * 20, document + [rng.randrange(NUM_WORDS) for _ in range(37)]
    boundary = document[: 2 * BLOCK_SIZE]
    longer = first + [rng.randrange(NUM_WORDS) for _ in range(9)]
    for prompt, beside in ((first, other), (other, first), (longer, boundary), (boundary, longer[:-1])):
        yield [prompt, beside][:num_decoders]
    yield None
    for prompt, beside in ((first, longer), ([*boundary, 3], document)):
        yield [prompt, beside][:num_decoders]


def missing(outcome: Outcome) -> list[str]:
    """Return the sources that a case is made for and that gave nothing: then it shows nothing."""
    case, wanted = outcome.case, ["engine", "computed"]
    if case.page_size > 1:
        wanted.append("copied")
    if case.tiers == "memory" and case.transfer != "handoff":
        wanted.append("memory")
    if case.tiers == "disk" and case.transfer != "handoff":
        wanted.append("disk")
    if case.transfer != "none":
        wanted.append(case.transfer)
    if case.num_draft_tokens and not outcome.num_drafted:
        return ["no token was drafted"]
    found = {**outcome.tokens, "disk": outcome.num_blocks_read}
    return [f"no token came from: {source}" for source in wanted if not found.get(source)]


@contextmanager
def fleet(device: str, say: Callable[[str], None]) -> Iterator[Fleet]:
    """Start everything; all of it is gone afterwards."""
    sys.path.insert(0, str(EXAMPLES))
    import prefill_decode

    with tempfile.TemporaryDirectory(prefix="raykv-matrix-") as folder:
        say("starting two Ray nodes")
        with prefill_decode.two_nodes() as nodes:
            say("starting the stores")
            stores = {
                "memory": kvstore.start("32MiB", name="memory", timeout_s=START_S),
                # LRU, or what is used again and again stayed in memory.
                "disk": kvstore.start(
                    SMALL_BYTES,
                    name="disk",
                    eviction="lru",
                    disk_path=folder,
                    disk_capacity="64MiB",
                    timeout_s=START_S,
                ),
            }
            try:
                yield Fleet(stores, nodes, device)
            finally:
                say("stopping")
                for store in stores.values():
                    store.stop()


def run(cases: Iterable[Case], device: str, say: Callable[[str], None]) -> list[Outcome]:
    """Run cases one after the other, with all engines on a device; what is wrong is in the outcomes."""
    cases, outcomes = list(cases), []
    with fleet(device, say) as workers:
        for number, case in enumerate(cases):
            say(f"{number + 1} of {len(cases)}: {case}")
            outcomes.append(workers.run(case))
    return outcomes
