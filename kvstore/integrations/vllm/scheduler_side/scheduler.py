"""The scheduler's half: it looks up prompts, plans loads and saves, and says when blocks may be freed.

Except `reset`, its methods do not wait for the store. Shared memory shows what is surely absent; other answers come
from a thread (lookups.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstore.blocks.hashing import Namespace
from kvstore.client.client import Client
from kvstore.integrations.vllm.link import StoreLink
from kvstore.integrations.vllm.options import Options, SavePolicy
from kvstore.integrations.vllm.plan import Local, StepPlan, WorkerHello, WorkerReport
from kvstore.integrations.vllm.scheduler_side.ending import Ending
from kvstore.integrations.vllm.scheduler_side.events import StoreEvents
from kvstore.integrations.vllm.scheduler_side.handoffs import HandoffSide
from kvstore.integrations.vllm.scheduler_side.keys import NO_CONTENT, PromptHashes, has_content
from kvstore.integrations.vllm.scheduler_side.lookups import Lookups, Question
from kvstore.integrations.vllm.scheduler_side.saving import Saving
from kvstore.integrations.vllm.scheduler_side.tracked import Tracked
from kvstore.integrations.vllm.stats import Stats

logger = logging.getLogger(__name__)

#: An answer that vLLM had and could not use is looked up again after this time: blocks may have been evicted. An
#: answer of the thread is given once whatever its age, or none would be young enough where steps or lookups take
#: longer. An immediate answer is not, as the next one is immediate too.
_ANSWER_S = 1.0
#: Hashing waits for the launch of a step that computes at least this share of the tokens: such a step takes longer.
_LAUNCHED_SHARE = 0.25


class SchedulerSide:
    """The scheduler's half of one engine.

    Args:
        engine_block_size: tokens of vLLM's blocks.
        num_workers: workers that report the end of each load and save.
        loads: whether this engine uses stored blocks.
        produces: whether it stores and hands off what it computes, as options and requests say.
        emits_events: whether KV cache events are enabled.
        stats: gets times and counts.
        names_media: whether vLLM names media by more than a count; if not, requests with media go on without the store.
        keeps_memory: whether the cache's memory stays while the engine is idle; with sleep mode it does not.
        num_anew: blocks at the end of a match that are computed, as vLLM does after a hit in its own cache: 1 for EAGLE
            and MTP. What they keep for a block's last token depends on the token behind it, which is not hashed.
    """

    def __init__(
        self,
        options: Options,
        engine_block_size: int,
        num_workers: int,
        *,
        loads: bool,
        produces: bool,
        emits_events: bool,
        stats: Stats,
        names_media: bool = True,
        keeps_memory: bool = True,
        num_anew: int = 0,
    ) -> None:
        self._options, self._engine_block_size, self._num_workers = options, engine_block_size, num_workers
        self._loads, self._produces, self._num_anew = loads, produces, num_anew
        self._saves = produces and options.save is not SavePolicy.NONE
        self.events, self.stats, self._names_media = StoreEvents(emits_events, engine_block_size), stats, names_media
        #: Whether these are set: before that no request is tracked, nothing is loaded and nothing saved.
        self.is_open = False
        self.space: Namespace
        self.link: StoreLink
        self.lookups: Lookups
        self.saving: Saving
        self.handoffs: HandoffSide
        self.tracked: dict[str, Tracked] = {}
        #: Requests that go on without the store, until they end.
        self.untracked: set[str] = set()
        self.ending = Ending(engine_block_size, num_workers, keeps_memory=keeps_memory)
        self.next_plan = StepPlan()
        self.answered = threading.Event()
        #: Whether the engine's steps are launched by this process, on a GPU.
        self.is_launching = False
        #: Workers that have yet to drop saves of blocks computed before the cache was cleared.
        self._num_drops_open = 0
        #: Until this is set nothing is loaded, saved or handed off: the store may have blocks of other weights.
        self.cleared = threading.Event()
        self.cleared.set()
        #: vLLM's own blocks, and whether they had KV of before at the last reset. Only another reset ends that.
        self.own_blocks: Any = None
        self._keeps_old = False
        self.work: queue.SimpleQueue[Question | threading.Event | None] = queue.SimpleQueue()

    def open(self, found: Sequence[WorkerHello], *, is_alone: bool = True) -> None:
        """Connect to the store with the workers' findings.

        Args:
            found: by each worker.
            is_alone: whether hand-offs are for this connector, and a store that is away is an error.

        Raises:
            StoreNotRunning: there is no store on this node.
        """
        options, stats, size, num_workers = self._options, self.stats, self._engine_block_size, self._num_workers
        self.space = space = found[0].space
        self.saving = Saving(space, size, num_workers, options.save is SavePolicy.ALL, stats)
        self.handoffs = HandoffSide(space, size, num_workers, self._produces, options.handoff_ttl_s, stats, is_alone)
        for hello in found:
            self.handoffs.learn(hello.desks)
        self.ending.open([hello.copies.value for hello in found])
        self.is_launching = all(hello.is_on_gpu and hello.copies.value is not None for hello in found)
        link = StoreLink(options, space, on_open=(Client.map_presence, self.events.opened), may_be_away=not is_alone)
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            self.lookups = Lookups(link, options, stats, self.answered, self.work)
            undo.pop_all()
        self.link, self.is_open = link, True

    def close(self) -> None:
        """End the thread and close the client; may be called again."""
        self.events.close()
        self.cleared.set()  # The thread need not try any more.
        if self.is_open:
            self.lookups.close()
            self.link.close()

    def begin(self, request: Any) -> None:
        """Begin to look up a new request, so that the answer is there when vLLM asks.

        Logs an error of one request and does not raise it: vLLM would end the engine, and all other requests with it.
        """
        name = request.request_id
        if not (self.is_open and self.cleared.is_set()) or name in self.tracked or name in self.untracked:
            return
        # Reports could not tell two requests of one name apart.
        if getattr(request, "resumable", False) or name in self.ending.requests:
            return
        features, trusts = getattr(request, "mm_features", None) or (), self._options.trust_media_uuids
        tracked = Tracked(request, dict.fromkeys(range(len(features)), b"") if trusts else {}, may_save=self._saves)
        try:
            if features and not (self._names_media and (trusts or has_content(features))):
                if not self.stats.total().get("num_unnamed_media_requests"):
                    logger.warning(NO_CONTENT, name)
                self.stats.count("num_unnamed_media_requests")
                self.untracked.add(name)
                return
            tracked.may_load = self._loads and not request.skip_reading_prefix_cache
            self.handoffs.begin(tracked)
            self._ask(tracked)
        except Exception:
            self.untracked.add(name)
            self.stats.count("num_request_errors")
            logger.exception("request %s goes on without the store", name)
            return
        self.tracked[name] = tracked  # Not earlier: the methods that vLLM calls next rely on its question.

    def match(self, request: Any, num_engine_tokens: int) -> tuple[int | None, bool]:
        """Answer `get_num_new_matched_tokens`; None while the store has not answered."""
        self.begin(request)
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.num_engine_tokens, tracked.num_external_tokens = num_engine_tokens, 0
        if not self.cleared.is_set():
            return 0, False
        size, question = self.space.shape.block_size, tracked.question
        is_old = question is not None and question.is_given and time.monotonic() > question.asked_s + _ANSWER_S
        if question is None or (is_old and tracked.may_load):
            question = self._ask(tracked)
        num_usable = (request.num_prompt_tokens - self._num_anew) // size - self._num_anew
        # A prompt that is handed off needs its hashes, even if the engine has all its blocks.
        is_covered = num_usable * size <= num_engine_tokens
        if is_covered and (question.done or not tracked.may_publish):
            return 0, False
        if not question.done and not self.next_plan.num_waiting:
            self.answered.clear()  # It may be set by earlier answers; the next answer ends the wait.
        if not question.done and not self.lookups.is_held_up():
            self.next_plan.num_waiting += 1
            self.next_plan.num_unhashed_tokens += request.num_prompt_tokens if question.hashes is None else 0
            return None, False
        question.is_given = question.done
        if not question.done:
            self.stats.count("num_late_lookups")
        tracked.hashes = tracked.hashes if question.hashes is None else question.hashes
        num_blocks = min(question.num_blocks - self._num_anew, num_usable)
        if tracked.arriving and tracked.hashes is not None:
            num_blocks = tracked.arriving[0].num_blocks
        num_new = num_blocks * size - num_engine_tokens
        if not tracked.may_load or num_new <= 0:
            return 0, False
        return num_new, True

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load once vLLM has given it blocks; called again, with 0 tokens, after the load."""
        tracked = self.tracked.get(request.request_id)
        self.ending.given(blocks, 0 if tracked is None else tracked.num_engine_tokens)
        if not num_external_tokens or tracked is None or tracked.hashes is None:
            return
        size = self.space.shape.block_size
        num_blocks = -(-(tracked.num_engine_tokens + num_external_tokens) // size)
        ids = list(blocks.get_block_ids()[0])[: -(-num_blocks * size // self._engine_block_size)]
        tracked.is_loading, tracked.num_external_tokens = True, num_external_tokens
        tickets, tracked.arriving = tracked.arriving, ()  # A ticket is good for one fetch.
        tracked.is_fetching = bool(tickets)
        prompt = self.handoffs.prompt_of(tracked) if tickets else None
        self.next_plan.loads.append(tracked.plan_load(tracked.hashes[:num_blocks], ids, tickets, prompt))
        if not tickets:  # The store may not have handed-off blocks.
            tracked.num_saved = num_blocks

    def plan(self, output: Any) -> StepPlan:
        """Return the workers' plan for this step, and begin the plan of the next one."""
        plan, self.next_plan = self.next_plan, StepPlan()
        plan.answered = Local(self.answered)
        plan.is_computing = output.total_num_scheduled_tokens > 0
        if self.is_open and (num_tokens := self.lookups.num_unhashed_tokens):
            if self.is_launching and output.total_num_scheduled_tokens >= _LAUNCHED_SHARE * num_tokens:
                plan.launched = Local(self.lookups.hash_rest)
            else:
                self.lookups.hash_rest()
        plan.settle = set(getattr(output, "preempted_req_ids", None) or ())
        if plan.settle:
            self.stats.count("num_preempted", len(plan.settle))
        self.ending.settle(plan, output.scheduled_cached_reqs.new_block_ids)
        for req_id in plan.settle:
            if (tracked := self.tracked.get(req_id)) and not tracked.is_loading:
                tracked.num_saved = tracked.num_planned_tokens = 0
        cached = output.scheduled_cached_reqs
        given = [(new.req_id, new.block_ids, new.num_computed_tokens, True) for new in output.scheduled_new_reqs]
        given += [
            (req_id, ids, begin, req_id in cached.resumed_req_ids)
            for req_id, ids, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        ]
        for req_id, ids, begin, has_all_blocks in given:
            if tracked := self.tracked.get(req_id):
                if has_all_blocks:
                    tracked.block_ids = []
                tracked.block_ids.extend(ids[0] if ids else ())
                end = begin + output.num_scheduled_tokens[req_id]
                self.saving.plan(plan.saves, tracked, begin, end)
                self.handoffs.plan(plan, tracked, begin, end)
        return plan

    def ended(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take in that a request ended, and forget it.

        Args:
            request: the ended request.
            block_ids: the blocks that it still has.

        Returns:
            Whether vLLM has to keep its blocks until they are reported as sent, and the params for the engine that
            decodes it.
        """
        self.untracked.discard(request.request_id)
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return False, None
        if block_ids and not tracked.is_loading:
            is_alike = all(own == its for own, its in zip(tracked.block_ids, block_ids, strict=False))
            self.saving.leave(tracked, "" if is_alike else "vLLM ended it with other blocks than it gave")
            # The hashes may have come after the last step was planned. That plan counted drafts. If one was rejected,
            # the cache has its KV, not that of the token sampled instead; num_computed_tokens does not count it.
            end = min(tracked.num_planned_tokens, request.num_computed_tokens)
            self.saving.plan(self.next_plan.late_saves, tracked, end, end)
        del self.tracked[request.request_id]
        params = self.handoffs.end(self.next_plan, tracked)
        # vLLM keeps the blocks of a load under way by itself.
        if tracked.is_loading or not tracked.is_copied:
            return False, params
        return self.ending.add(self.next_plan, tracked), params

    def heard(self, received: set[str], report: WorkerReport | None) -> None:
        """Take in which loads are received, and the workers' report."""
        for req_id in received:
            if tracked := self.tracked.get(req_id):
                tracked.is_loading = False
        if not self.is_open:
            return
        report = WorkerReport() if report is None else report
        self.handoffs.learn(report.desks)
        for req_id, num_tokens in report.failed_loads.items():
            if tracked := self.tracked.get(req_id):
                # No second load: it could fail, and be waited for, again and again. After a failed hand-off the store
                # is asked, if vLLM asks.
                tracked.may_load, tracked.question = tracked.may_load and tracked.is_fetching, None
                tracked.num_saved = min(tracked.num_saved, num_tokens // self.space.shape.block_size)
        # What the store brought counts as saved, and what came by hand-off does not.
        loaded = [(req_id, self.tracked[req_id].num_saved) for req_id in received if req_id in self.tracked]
        for req_id, num_blocks in (*loaded, *report.stored):
            tracked = self.tracked.get(req_id) or self.ending.requests.get(req_id)
            if tracked is not None and tracked.hashes is not None and tracked.may_tell:
                self.events.stored(self.space, tracked.request, tracked.hashes[:num_blocks])
        for req_id in report.saves_ended.keys() | report.landing.keys():
            if tracked := self.tracked.get(req_id) or self.ending.requests.get(req_id):
                tracked.num_saves_open -= report.saves_ended[req_id]
                tracked.num_landing += report.landing[req_id]
                if not tracked.is_copied:
                    self.ending.requests.pop(req_id, None)
        if report.num_drops and self._num_drops_open:
            self._num_drops_open = max(0, self._num_drops_open - report.num_drops)
            if not self._num_drops_open and not self._keeps_old:
                # A save that ran while the store was cleared may have stored blocks after that.
                self.work.put(self.cleared)

    def reset(self) -> bool:
        """Make all blocks of this namespace a miss on every node, after weights changed. Waits for the store.

        Returns:
            False when a node could not be asked, or a load of old blocks is still under way.

        Raises:
            CopyStuck: a save does not end. The store was asked to clear all the same.
        """
        try:
            self.ending.drop_saves()
        finally:  # Old blocks must not be loaded with new weights, whatever goes wrong.
            if any(tracked.num_saves_open for tracked in (*self.tracked.values(), *self.ending.requests.values())):
                self.next_plan.drop_saves, self._num_drops_open = True, self._num_workers
            is_loading = False
            for tracked in self.tracked.values():  # Their blocks were computed before the reset.
                tracked.may_save = tracked.may_publish = tracked.may_tell = False
                tracked.question = None
                is_loading = is_loading or tracked.is_loading
            for tracked in self.ending.requests.values():
                tracked.may_tell = False
            self.events.cleared()
            is_clear = self._clear()
        return is_clear and not is_loading

    def _clear(self) -> bool:
        """Clear the store; until that, or a later try of the thread, has worked after all old saves, go without it."""
        self.cleared.set()  # Ends the tries for weights of before.
        error = self.link.clear() if self.is_open else "it was not there yet"
        self.cleared, own = threading.Event(), self.own_blocks
        # While requests use blocks, vLLM does not clear its own cache, nor say so to anyone who does not look. What
        # hits there would be saved as KV of the new weights. Its null block is always in use.
        self._keeps_old = own is not None and own.num_gpu_blocks - own.get_num_free_blocks() > 1
        if self._keeps_old:
            why = "requests still use vLLM's own cache, so it keeps KV of before: reset it again when they have ended"
        else:
            why = error or ("blocks of before are still being saved" if self._num_drops_open else "")
        if why:
            logger.warning("this engine neither loads nor saves until the store is cleared: %s", why)
        else:
            self.cleared.set()
        if not self._num_drops_open and not self._keeps_old:  # Else when the workers have dropped their saves.
            self.work.put(self.cleared)
        return not error and not self._keeps_old

    def _ask(self, tracked: Tracked) -> Question:
        prompt, is_arriving = PromptHashes(self.space, tracked.request, tracked.media), bool(tracked.arriving)
        question = Question(
            prompt,
            tracked.hashes,
            is_lookup=tracked.may_load and not is_arriving,
            needs_hashes=tracked.may_publish or is_arriving,
        )
        tracked.question = question
        self.lookups.ask(question)
        return question
