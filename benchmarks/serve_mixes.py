"""Kinds of requests for benchmarks/serve_choices.py: who asks what, one after the other. A token is a character."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: No two texts begin alike by chance: the routers compare texts and blocks.
_LETTERS = "abcdefghijklmnopqrstuvwxyz      "


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Args:
        prompt: text.
        answer: what the engine will say, which is in its cache afterwards, too.
    """

    prompt: str
    answer: str


#: The requests of one client, which asks the next one when it has read the answer and thought about it.
Stream = list[Ask]


def shared(num_requests: int, num_streams: int, seed: int) -> list[Stream]:
    """Return requests with long system prompts, of which some are asked more than others."""
    return _behind_systems(num_requests, num_streams, seed, [1 / (rank + 4) for rank in range(24)])


def hot(num_requests: int, num_streams: int, seed: int) -> list[Stream]:
    """Return the same with a system prompt that two of three requests have: more than one replica can take."""
    return _behind_systems(num_requests, num_streams, seed, [46, *[1] * 23])


def conversations(num_requests: int, num_streams: int, seed: int, *, turns: int = 6) -> list[Stream]:
    """Return conversations of several turns behind one short system prompt, one after the other in each stream."""
    dice = random.Random(seed)
    system = _text(dice, 96)
    streams: list[Stream] = []
    for number in range(num_streams):
        stream: Stream = []
        while len(stream) < len(range(number, num_requests, num_streams)):
            text = system
            for _ in range(dice.randint(2, 2 * turns - 2)):
                text += _text(dice, dice.randint(64, 192))
                answer = _text(dice, dice.randint(32, 128))
                stream.append(Ask(text, answer))
                text += answer
        streams.append(stream[: len(range(number, num_requests, num_streams))])
    return streams


def mixed(num_requests: int, num_streams: int, seed: int) -> list[Stream]:
    """Return both beside each other, and prompts that nobody asks twice in between."""
    dice = random.Random(seed)
    num_talks = num_streams // 2
    num_asked = num_requests * num_talks // num_streams
    streams = conversations(num_asked, num_talks, seed)
    others = [ask for stream in shared(num_requests - num_asked, 1, seed + 1) for ask in stream]
    for position in range(0, len(others), 5):
        others[position] = Ask(_text(dice, dice.randint(128, 768)), _text(dice, 32))
    num_others = num_streams - num_talks
    return streams + [others[number::num_others] for number in range(num_others)]


MIXES: dict[str, Callable[[int, int, int], list[Stream]]] = {
    "shared": shared, "hot": hot, "conversations": conversations, "mixed": mixed,
}  # fmt: skip


def _behind_systems(num_requests: int, num_streams: int, seed: int, weights: list[float]) -> list[Stream]:
    dice = random.Random(seed)
    systems = [_text(dice, 512) for _ in weights]
    asks = [
        Ask(dice.choices(systems, weights)[0] + _text(dice, dice.randint(32, 128)), _text(dice, 32))
        for _ in range(num_requests)
    ]
    return [asks[number::num_streams] for number in range(num_streams)]


def _text(dice: random.Random, num_tokens: int) -> str:
    return "".join(dice.choices(_LETTERS, k=num_tokens))
