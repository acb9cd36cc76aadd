"""One request's hold on a paged prefix cache: locked pages of the tree, and pages of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.paged.copying import PageCopy, PendingCopy, find_source, lock_source
from kvstore.paged.evicting import make_room
from kvstore.paged.node import Node, RootKey
from kvstore.paged.sequence import SequencePages
from kvstore.paged.tokens import TOKEN_BYTES, EncodedTokens, TokenIds, encode_tokens
from kvstore.paged.tree import PrefixTree
from kvstore.paged.units import Pages, Slots, check_count


class PagedRequest:
    """The pages of one request, until it is released. `PagedPrefixCache.acquire` makes it.

    Its first pages belong to the tree and are locked: they are only read. All later ones are its own. No page that
    it has is replaced while it has it, so a page table on the GPU stays true. An equal page that another request
    inserted first therefore stays beside it until the release.

    Calls must come from the thread of the cache. A request that is never released keeps its pages.
    """

    def __init__(
        self,
        tree: PrefixTree,
        key: RootKey,
        prompt: EncodedTokens,
        limit_tokens: int,
        node: Node,
        sequences: tuple[SequencePages, ...],
        on_release: Callable[[PagedRequest], None],
    ) -> None:
        self._tree, self._key, self._prompt, self._limit_tokens = tree, key, prompt, limit_tokens
        self._node, self._sequences, self._on_release = node, sequences, on_release
        self._copy: PendingCopy | None = None
        self._first_pages = [0] * len(sequences)
        self._num_copied_until = 0  # Tokens up to the end of the last copy, a prepared one, too.
        self._has_step = self._is_step_whole = False
        self._is_released = False
        self.num_cached_tokens = self.num_tokens
        """Leading tokens that need no computing, because the cache had them: `skip_prefix_tokens` of a load."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens that have slots, without those of an incomplete step."""
        return self._sequences[0].num_tokens

    @property
    def num_slots(self) -> int:
        """Return the tokens that have slots, also those of an incomplete step."""
        return self.num_tokens + self._sequences[0].num_step_tokens

    @property
    def is_released(self) -> bool:
        """Return whether the request gave back its pages."""
        return self._is_released

    def pages(self, group: int = 0) -> Pages:
        """Return the pages of a group in the order of tokens; -1 for those before a window.

        Returns:
            int32, a new array. The ids are good until the request is released, or its windows are trimmed.

        Raises:
            InvalidRequest: no such group.
        """
        return self._sequence("pages", group).pages.copy()

    def slots(self, start: int, stop: int, group: int = 0) -> Slots:
        """Return the token slots of tokens `[start, stop)`, int64; -1 for tokens before a window.

        Raises:
            InvalidRequest: no such group or tokens.
        """
        return self._sequence("slots", group).slots(start, stop)

    def extend(self, num_tokens: int) -> tuple[Slots, ...]:
        """Give slots to more tokens; pages that no request needs are evicted for it. 0 is allowed.

        Returns:
            For each group int64 `[num_tokens]`, the slots of the new tokens.

        Raises:
            InvalidRequest: num_tokens is no count, a copy or step is not complete, or the request was released;
                nothing was changed.
            PoolExhausted: other requests need the pages; this request was not changed.
        """
        self._make_room(self._count("extend", num_tokens))
        return tuple(sequence.extend(int(num_tokens)) for sequence in self._sequences)

    def prepare_step(self, num_tokens: int, *, only_windows: bool = False) -> tuple[Slots, ...]:
        """Reserve slots for tokens that may be rejected; `complete_step` says how many stay.

        Args:
            num_tokens: of the step.
            only_windows: groups with a window get pages only for the window of the token after the step, and slots of
                -1 before it: for KV that comes from elsewhere at once. Then the step is accepted whole, or not at all.

        Raises:
            InvalidRequest, PoolExhausted: as for `extend`.
        """
        end = self.num_tokens + self._count("prepare_step", num_tokens)
        page_size = self._tree.page_size
        firsts = [group.first_page(end, page_size) if only_windows else 0 for group in self._tree.groups]
        self._make_room(num_tokens, firsts)
        self._has_step, self._is_step_whole = True, only_windows and bool(self._tree.windows)
        steps = zip(self._sequences, firsts, strict=True)
        return tuple(sequence.prepare_step(int(num_tokens), first) for sequence, first in steps)

    def complete_step(self, num_accepted: int) -> None:
        """Keep the first tokens of the prepared step, and give back what only the others needed.

        Raises:
            InvalidRequest: no step was prepared, more than were reserved, a part of a step with `only_windows`, or the
                request was released; nothing was changed.
        """
        self._check("complete_step")
        if not self._has_step:
            raise InvalidRequest("complete_step: wanted a prepared step, got none; call prepare_step first")
        most = self._sequences[0].num_step_tokens
        if check_count("complete_step", "num_accepted", num_accepted, most) not in (0, most) and self._is_step_whole:
            raise InvalidRequest(f"complete_step: wanted 0 or all {most} tokens of this step, got {num_accepted}")
        if num_accepted and self._is_step_whole:
            self._drop_unfilled(num_accepted)
        self._has_step = False
        for sequence in self._sequences:
            sequence.complete_step(num_accepted)

    def prepare_copy(self) -> tuple[PageCopy, ...]:
        """Reserve a page of its own for a page of the tree that begins like the rest of the prompt.

        The caller copies, and then calls `complete_copy`. Until then the source stays in the tree.

        Returns:
            One copy per group; none if no page shares a token, or no page is free for it.

        Raises:
            InvalidRequest: the request has tokens behind its pages of the tree, or a copy or step is not complete,
                or it was released; nothing was changed.
        """
        self._count("prepare_copy", 0)
        if self.num_tokens != self._node.end_page * self._tree.page_size:
            raise InvalidRequest("prepare_copy: wanted a request right after acquire; nothing was changed")
        limit_tokens = min(self._limit_tokens, self._prompt.num_tokens)
        start = self._node if self._node.parent is not None else self._tree.roots.get(self._key)
        if start is None or limit_tokens <= self.num_tokens:
            return ()
        source = find_source(self._tree, start, self._prompt.data, self.num_tokens, limit_tokens)
        if source is None:
            return ()
        page = self._node.end_page
        lock_source(self._tree, source, page, 1)
        try:
            self._make_room(1)
        except PoolExhausted:
            lock_source(self._tree, source, page, -1)
            return ()
        targets = [sequence.allocator.alloc(1) for sequence in self._sequences]
        self._copy = PendingCopy(source, page, targets)
        self._num_copied_until = self.num_tokens + source.num_tokens
        pages = zip(source.pages, targets, strict=True)
        return tuple(
            PageCopy(group=group, source_page=page, target_page=int(target[0]), num_tokens=source.num_tokens)
            for group, (page, target) in enumerate(pages)
        )

    def complete_copy(self) -> int:
        """Count the copied tokens as the request's own. Returns how many.

        Raises:
            InvalidRequest: no copy was prepared; nothing was changed.
        """
        copy = self._end_copy("complete_copy")
        if self.num_cached_tokens == self.num_tokens:  # Otherwise the request computed tokens before the copied ones.
            self.num_cached_tokens += copy.source.num_tokens
        for sequence, target in zip(self._sequences, copy.targets, strict=True):
            sequence.add_partial(target, copy.source.num_tokens)
        return copy.source.num_tokens

    def abort_copy(self) -> None:
        """Give back the page that a copy was to write. The copy must not run any more.

        Raises:
            InvalidRequest: no copy was prepared; nothing was changed.
        """
        copy = self._end_copy("abort_copy")
        self._num_copied_until = 0
        for sequence, target in zip(self._sequences, copy.targets, strict=True):
            sequence.allocator.give_back(target)

    def insert(self, token_ids: TokenIds, num_computed_tokens: int | None = None) -> int:
        """Let other requests find the whole pages of the tokens that are computed.

        The pages go to the tree, which keeps them after the release. Where it has equal ones, it keeps those.

        Args:
            token_ids: of the request, from its first token on; they begin with those that `acquire` found, and go
                on with those that were copied.
            num_computed_tokens: how many of them have their KV in place; None for all that have slots.

        Returns:
            How many pages of each group are new in the tree.

        Raises:
            InvalidRequest: too few tokens, other tokens than before, more than have slots, or the request was
                released; nothing was changed.
        """
        self._check("insert")
        tokens = encode_tokens(token_ids)
        most = min(self.num_tokens, tokens.num_tokens)
        wanted = self.num_tokens if num_computed_tokens is None else num_computed_tokens
        end = check_count("insert", "num_computed_tokens", wanted, most) // self._tree.page_size
        shared = self._node.end_page * self._tree.page_bytes
        known = max(shared, self._num_copied_until * TOKEN_BYTES)
        compared = max(shared, min(known, len(tokens.data)))  # The copied tokens need not be named yet.
        if tokens is not self._prompt and not tokens.data.startswith(memoryview(self._prompt.data)[:compared]):
            raise InvalidRequest("insert: wanted the tokens that the request began with, got others")
        if compared == known:
            self._prompt = tokens
        return self._insert(tokens, end) if end > self._node.end_page else 0

    def trim_windows(self, num_computed_tokens: int) -> int:
        """Give up pages before the windows of the next token; those of the tree stay there until evicted.

        Args:
            num_computed_tokens: tokens whose KV is in place. Insert them first, if others are to find them.

        Returns:
            How many pages became free, of all groups.

        Raises:
            InvalidRequest: more tokens than have slots, or the request was released; nothing was changed.
        """
        self._check("trim_windows")
        computed = check_count("trim_windows", "num_computed_tokens", num_computed_tokens, self.num_tokens)
        page_size, freed = self._tree.page_size, 0
        for group in self._tree.windows:
            first = self._tree.groups[group].first_page(computed, page_size)
            start = self._first_pages[group]
            if first > start:
                self._unlock_window(group, start, first)
                freed += self._sequences[group].drop(start, first)
                self._first_pages[group] = first
        return freed

    def release(self) -> bool:
        """Give back all pages: locks end, and pages of its own are free. No copy and no kernel may use them now.

        Returns:
            Whether the request still had them; a second call changes nothing.
        """
        if self._is_released:
            return False
        if self._copy is not None:
            self.abort_copy()
        self._is_released = True
        for group in self._tree.windows:
            self._unlock_window(group, self._first_pages[group], self._node.end_page)
        for sequence in self._sequences:
            sequence.release()
        self._tree.unlock(self._node)
        self._on_release(self)
        return True

    def private_pages(self, group: int) -> Pages:
        """Return the pages of a group that only this request has, in a new array."""
        sequence = self._sequence("private_pages", group)
        targets = [] if self._copy is None else [self._copy.targets[group]]
        return np.concatenate([sequence.owned(0, sequence.num_pages), *targets])

    def _insert(self, tokens: EncodedTokens, end: int) -> int:
        tree, above = self._tree, self._node
        if above.parent is None:
            above = tree.root(self._key)
        found = tree.find(above, tokens.data, end * tree.page_size)
        node = tree.cut(found)
        tree.fill_gaps(node, above, self._sequences)
        tree.lock(node, above)
        start = node.end_page
        if start < end:
            data = tokens.data[start * tree.page_bytes : end * tree.page_bytes]
            full = set(tree.full)
            pages = [
                sequence.hand_over(start, end, never_drops=group in full)
                for group, sequence in enumerate(self._sequences)
            ]
            node = tree.append(node, data, pages)
        self._node = node
        return end - start

    def _drop_unfilled(self, num_step_tokens: int) -> None:
        """Give up a page whose first tokens were there and whose others lie before the windows of a step."""
        page_size = self._tree.page_size
        page, num_filled = divmod(self.num_tokens, page_size)
        for group in self._tree.windows:
            first = self._tree.groups[group].first_page(self.num_tokens + num_step_tokens, page_size)
            # The others' slots are not written by anybody, so as a whole page it must not be found.
            if num_filled and page < first:
                self._sequences[group].drop(page, page + 1)

    def _unlock_window(self, group: int, start: int, stop: int) -> None:
        stop = min(stop, self._node.end_page)
        if start < stop:
            sequence = self._sequences[group]
            held = ~sequence.is_own(start, stop) & (sequence.pages[start:stop] >= 0)
            self._tree.lock_window(self._node, group, start, held, -1)

    def _end_copy(self, verb: str) -> PendingCopy:
        copy = self._copy
        if copy is None:
            raise InvalidRequest(f"{verb}: wanted a prepared copy, got none; nothing was changed")
        self._copy = None
        lock_source(self._tree, copy.source, copy.page, -1)
        return copy

    def _make_room(self, num_tokens: int, firsts: Sequence[int] | None = None) -> None:
        pages = zip(self._sequences, firsts or [0] * len(self._sequences), strict=True)
        make_room(self._tree, [sequence.num_pages_for(num_tokens, first) for sequence, first in pages])

    def _count(self, verb: str, num_tokens: int) -> int:
        self._check(verb)
        if self._copy is not None:
            raise InvalidRequest(f"{verb}: wanted no prepared copy, got one; complete or abort it first")
        if self._sequences[0].num_step_tokens:
            raise InvalidRequest(f"{verb}: wanted no incomplete step, got one; complete it first")
        return check_count(verb, "num_tokens", num_tokens)

    def _check(self, verb: str) -> None:
        if self._is_released:
            raise InvalidRequest(f"{verb}: wanted a request with pages, got a released one; acquire another")

    def _sequence(self, verb: str, group: int) -> SequencePages:
        return self._sequences[check_count(verb, "group", group, len(self._sequences) - 1)]
