"""The requests that examples/prefill_decode.py serves, and the tokenizer they are read with."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 32
"""Tokens of a block."""

SYSTEM = """\
You are the night guide of a small observatory in the hills. Visitors write to you from the queue at the
door, from the car park, and sometimes from the dome itself, so keep each answer short enough to be read on
a telephone held in a mitten. Say what can be seen tonight with the bare eye before you name anything that
needs the telescope. Give directions by landmarks: the water tower is north, the chapel is east, the quarry
is south, the three poplars are west. When clouds come, offer the indoor tour and the meteorite that may be
touched. Never promise a clear sky. If somebody asks about horoscopes, be kind, tell them which constellation
the Sun really stood in on their birthday, and leave it at that. Red lamps only after sunset, please.

"""

DOCUMENT = """\
Minutes of the allotment society, spring meeting. The pump at the lower gate is to be mended before the bean
rows are sown; Plot 12 lends its cart. The compost heap moves two metres to the east, away from the beehives.
Water is shared by the calendar on the shed door, odd plots on odd days. The plum tree stays, by eleven votes
to four, but its windfalls are everybody's. A key was found and hangs behind the clock.

"""

ON_BOUNDARY = "List three things to pack for a walk over wet fields in October."
"""Exactly two blocks; with one more token the prompt goes one past the boundary."""

WARM_UP = "Before the doors open, read one page aloud, so that nobody's voice is cold. " * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of the demo.

    Args:
        title: what it shows.
        text: the prompt; with `after`, only what is added to that conversation.
        prefilled: the part of the prompt that the prefill worker computes first: "all", "document", or "none"
            when a router sends the request straight to the decode worker.
        after: title of the request whose prompt and answer this one continues.
        forgets: the decode worker's pages are evicted first, as if other requests had needed them.
    """

    title: str
    text: str
    prefilled: str = "all"
    after: str | None = None
    forgets: bool = False


REQUESTS = (
    Request(title="shorter than a block", text="Hello there!"),
    Request(title="ends on a block boundary", text=ON_BOUNDARY),
    Request(title="one token past the boundary", text=ON_BOUNDARY + "\n"),
    Request(title="a conversation, turn 1", text=SYSTEM + "Visitor: What is that bright light over the chapel?\n"),
    Request(
        title="the same one, turn 2",
        text="\nVisitor: And will it still be there when the late bus leaves at eleven?\n",
        after="a conversation, turn 1",
    ),
    Request(
        title="turn 1 from somebody else",
        text=SYSTEM + "Visitor: What is that bright light over the chapel?\n",
        forgets=True,
    ),
    Request(
        title="same guide, other question",
        text=SYSTEM + "Visitor: My daughter is four. Is there a step at the telescope?\n",
        prefilled="none",
    ),
    Request(
        title="known document, new question",
        text=DOCUMENT + "Question: who may eat the plums that fall?\n",
        prefilled="document",
    ),
    Request(
        title="never seen before",
        text="Rewrite as a haiku: the last tram had gone, so the two brothers carried the piano home between "
        "them, stopping under every lamp to play one note and rest.\n",
        prefilled="none",
    ),
)


def encode(text: str) -> list[int]:
    """Return one token per UTF-8 byte: deterministic, and nothing has to be downloaded."""
    return list(text.encode())
