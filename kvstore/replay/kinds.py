"""Make traces: requests of a kind, with known statistics, the same for the same seed.

Each kind is a few sessions that begin at random times. A session's prompt grows by its answers and questions; a
prompt's ids are those of its full blocks, and one of its own for a last block that is not full.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import log

from kvstore.bounds import clip
from kvstore.errors import ConfigError, InvalidRequest

BLOCK_TOKENS = 512
#: No prompt is longer.
MAX_TOKENS = 128_000
MAX_SECONDS = 86_400.0
#: Sessions begin this long before the trace does, so that its first requests are no more often new than others.
_WARM_UP_S = 1800.0


@dataclass(frozen=True, slots=True)
class MadeRequest:
    """A request of a made trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal number of tokens or seconds: its median, and the spread of its logarithm."""

    median: float
    sigma: float

    def draw(self, generator: random.Random) -> float:
        """Return one."""
        return generator.lognormvariate(log(self.median), self.sigma)


@dataclass(frozen=True, slots=True)
class Session:
    """What the requests of one user or agent are like.

    Args:
        first: tokens of the first prompt, after what all sessions share.
        turn: tokens of each later question.
        answer: tokens of each answer.
        pause: seconds between two requests.
        more: probability of a second request.
        more_after: probability of another one after that.
    """

    first: Lengths
    turn: Lengths
    answer: Lengths
    pause: Lengths
    more: float
    more_after: float


class Maker:
    """Collects requests and hands out new ids."""

    def __init__(self, seconds: float, generator: random.Random) -> None:
        self.seconds, self.generator = seconds, generator
        self.requests: list[MadeRequest] = []
        self._next_id = 0

    def new_ids(self, count: int) -> list[int]:
        """Return ids that nobody has."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def add(self, time_s: float, input_tokens: int, output_tokens: int, ids: list[int]) -> None:
        """Add a request; one outside the time of the trace is left out."""
        if 0 <= time_s < self.seconds:
            self.requests.append(MadeRequest(time_s, input_tokens, output_tokens, ids))

    def times(self, rate: float, begin_s: float) -> list[float]:
        """Return times at which something begins, `rate` a second."""
        found, time_s = list[float](), begin_s
        while (time_s := time_s + self.generator.expovariate(rate)) < self.seconds:
            found.append(time_s)
        return found

    def session(self, time_s: float, shared: list[int], kind: Session) -> None:
        """Add the requests of one session that begins with shared blocks."""
        draw, path = self.generator, list(shared)
        tokens, more = len(shared) * BLOCK_TOKENS + max(1, int(kind.first.draw(draw))), kind.more
        while True:
            tokens = min(tokens, MAX_TOKENS)
            full, partial = divmod(tokens, BLOCK_TOKENS)
            path += self.new_ids(full - len(path))
            answer = max(1, int(kind.answer.draw(draw)))
            self.add(time_s, tokens, answer, path + self.new_ids(bool(partial)))
            if tokens == MAX_TOKENS or draw.random() > more:
                return
            time_s += kind.pause.draw(draw)
            tokens += answer + max(1, int(kind.turn.draw(draw)))
            more = kind.more_after


CHAT = Session(Lengths(4300, 1.35), Lengths(600, 1.8), Lengths(290, 0.75), Lengths(125, 1.1), 0.28, 0.55)
TOOLS = Session(Lengths(1500, 1.3), Lengths(800, 1.0), Lengths(120, 0.7), Lengths(8, 0.8), 0.5, 0.75)
CODING = Session(Lengths(6000, 0.8), Lengths(1200, 1.1), Lengths(300, 0.8), Lengths(8, 1.2), 0.97, 0.97)


def make_conversation(maker: Maker, share: float = 1.0) -> None:
    """Add people who chat; one system prompt of a block."""
    system = maker.new_ids(1)
    for time_s in maker.times(2.2 * share, -_WARM_UP_S):
        maker.session(time_s, system, CHAT)


def make_tool_agent(maker: Maker, share: float = 1.0) -> None:
    """Add agents with one of 60 sets of tools, 4 to 24 blocks each; the n-th is used 1/n times as often."""
    sets = [maker.new_ids(maker.generator.randint(4, 24)) for _ in range(60)]
    weights = [1 / (place + 1) for place in range(len(sets))]
    for time_s in maker.times(4.0 * share, -_WARM_UP_S / 10):
        maker.session(time_s, maker.generator.choices(sets, weights)[0], TOOLS)


def make_coding_agent(maker: Maker, share: float = 1.0) -> None:
    """Add coding agents with one of 4 sets of tools, 30 blocks each."""
    sets = [maker.new_ids(30) for _ in range(4)]
    for time_s in maker.times(0.08 * share, -_WARM_UP_S / 3):
        maker.session(time_s, maker.generator.choice(sets), CODING)


def make_long_documents(maker: Maker, share: float = 1.0) -> None:
    """Add documents of 40 to 200 blocks that are asked about 1 to 6 times, about a minute apart."""
    generator, pause = maker.generator, Lengths(60, 0.7)
    for begin_s in maker.times(0.25 * share, -_WARM_UP_S / 3):
        document, time_s = maker.new_ids(generator.randint(40, 200)), begin_s
        for _ in range(generator.choice((1, 1, 1, 2, 3, 6))):
            maker.add(time_s, len(document) * BLOCK_TOKENS + 300, 200, document + maker.new_ids(1))
            time_s += pause.draw(generator)


def make_scan(maker: Maker) -> None:
    """Add conversations, and, from a sixth of the time on, prompts of 120 blocks that come once."""
    make_conversation(maker, 0.5)
    for time_s in maker.times(0.3, maker.seconds / 6):
        maker.add(time_s, 120 * BLOCK_TOKENS, 10, maker.new_ids(120))


def make_loop(maker: Maker) -> None:
    """Add 300 documents of 40 blocks, in the same order again and again, one every 2 seconds."""
    documents, time_s = [maker.new_ids(40) for _ in range(300)], 0.0
    while time_s < maker.seconds:
        for document in documents:
            maker.add(time_s, 40 * BLOCK_TOKENS + 100, 50, document + maker.new_ids(1))
            time_s += 2.0


def make_mix(maker: Maker) -> None:
    """Add conversations, tool agents, coding agents and long documents, each at a third to a half of their rate."""
    make_conversation(maker, 0.35)
    make_tool_agent(maker, 0.375)
    make_coding_agent(maker, 0.375)
    make_long_documents(maker, 0.4)


KINDS: dict[str, Callable[[Maker], None]] = {
    "conversation": make_conversation,
    "tool-agent": make_tool_agent,
    "coding-agent": make_coding_agent,
    "long-documents": make_long_documents,
    "scan": make_scan,
    "loop": make_loop,
    "mix": make_mix,
}


def make_requests(kind: str, seconds: float, seed: int) -> list[MadeRequest]:
    """Return the requests of a trace in the order of their time, with ids in the order of their first use.

    Raises:
        ConfigError: there is no such kind.
        InvalidRequest: the time is no number in its bounds, or no request came in it.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"KIND: wanted {', '.join(KINDS)}, got {clip(kind)}; `kvstore trace make --help` describes them"
        )
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(f"--seconds: wanted a number above 0, at most {MAX_SECONDS:g}, got {seconds}")
    maker = Maker(seconds, random.Random(f"{kind} {seed}"))
    KINDS[kind](maker)
    if not maker.requests:
        raise InvalidRequest(f"--seconds: wanted time for a request, got {seconds:g}, in which none came; take more")
    numbers: dict[int, int] = {}
    return [
        MadeRequest(
            each.time_s, each.input_tokens, each.output_tokens, [numbers.setdefault(i, len(numbers)) for i in each.ids]
        )
        for each in sorted(maker.requests, key=lambda each: each.time_s)
    ]


def as_mooncake(requests: list[MadeRequest]) -> str:
    """Return requests as lines of the Mooncake format."""
    return "".join(
        json.dumps(
            {
                "timestamp": int(each.time_s * 1000),
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": each.ids,
            }
        )
        + "\n"
        for each in requests
    )
