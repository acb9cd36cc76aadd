"""Tickets on their way from one client of the soak to another: files in a folder, taken by renaming them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.blocks.ticket import HandoffTicket

#: Letters that nobody took for so long are thrown away.
_OLDEST_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A ticket, and what its reader has to know to say what may become of a fetch.

    Args:
        ticket: of the blocks.
        node: index of the node that they were published on.
        chain: index of the chain whose blocks they are.
        first: the first of them.
        good_until_s: they may not expire before, by the machine's monotonic clock.
        num_clearings: of the namespace that were over when they were published.
        owner: of whoever published them, see `Mailbox.leaves`.
        path: the socket of the store that has them; another life of it has another one.
        may_be_missing: whether the publication was not granted yet when this was sent.
        may_be_withdrawn: whether the publisher takes them back, perhaps.
        may_be_used: whether somebody else may have fetched them: there are several of this letter, or a fetch failed.
    """

    ticket: HandoffTicket
    node: int
    chain: int
    first: int
    good_until_s: float
    num_clearings: int
    owner: str
    path: str
    may_be_missing: bool = False
    may_be_withdrawn: bool = False
    may_be_used: bool = False


def owner_name(number: int) -> str:
    """Return the name of a publisher of this process: another process with its id has other names."""
    return f"{os.getpid()}-{_began(os.getpid())}.{number}"


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; "" if there is none with this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Mailbox:
    """What clients send each other, and who of them has left.

    Args:
        folder: of all clients.
    """

    def __init__(self, folder: Path) -> None:
        self._letters, self._left, self._delivered = folder / "letters", folder / "left", folder / "delivered"
        for each in (self._letters, self._left, self._delivered):
            each.mkdir(parents=True, exist_ok=True)

    def send(self, letter: Letter, num_copies: int = 1) -> None:
        """Let others find a letter."""
        if num_copies > 1:
            letter = replace(letter, may_be_used=True)
        for _ in range(num_copies):
            name = f"{letter.node}-{time.monotonic():.3f}-{secrets.token_hex(4)}"
            new = self._letters / f"{name}.new"
            new.write_bytes(pickle.dumps(letter))
            new.replace(self._letters / f"{name}.letter")

    def take(self, rng: random.Random, node: int) -> Letter | None:
        """Take a letter away, from the other node two times of three; None when there is none."""
        found = sorted(path.name for path in self._letters.glob("*.letter"))
        now_s = time.monotonic()
        fresh = [name for name in found if now_s - float(name.split("-")[1]) < _OLDEST_S]
        for name in set(found) - set(fresh):
            (self._letters / name).unlink(missing_ok=True)
        there = [name for name in fresh if not name.startswith(f"{node}-")]
        names = there if there and rng.random() < 0.67 else fresh
        rng.shuffle(names)
        for name in names:
            mine = self._letters / f"{name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                (self._letters / name).rename(mine)
                letter = pickle.loads(mine.read_bytes())
                mine.unlink()
                assert isinstance(letter, Letter)
                return letter
        return None

    def leaves(self, owner: str) -> None:
        """Say that a publisher is about to close: what it published goes with it."""
        (self._left / owner).touch()

    def has_left(self, owner: str) -> bool:
        """Whether a publisher, named by `owner_name`, has closed, or its process is gone."""
        pid, began = owner.split(".", 1)[0].split("-")
        return (self._left / owner).exists() or _began(int(pid)) != began

    def is_first(self, key: bytes) -> bool:
        """Note that the blocks of a ticket were delivered; returns whether that happened for the first time."""
        try:
            (self._delivered / key.hex()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
