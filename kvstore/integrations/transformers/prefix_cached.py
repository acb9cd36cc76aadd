"""A model whose `generate` takes the KV of known prefixes out of a store."""

from __future__ import annotations

import functools
import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteriaList

from kvstore.blocks.hashing import BlockHashes, space_of_tenant
from kvstore.bounds import check_count, check_seconds, parse_bytes
from kvstore.errors import ConfigError, InvalidRequest, LayoutMismatch, StoreUnavailable, UnsupportedModel
from kvstore.integrations.transformers.cache.columns import CACHE_NAME, Planes, keep_windows_only, new_cache, planes_of
from kvstore.integrations.transformers.first_token import AfterFirstToken
from kvstore.integrations.transformers.identity import Snapshot, kv_shape, namespace_of
from kvstore.integrations.transformers.link import StoreLike, StoreLink
from kvstore.integrations.transformers.probe import can_pad
from kvstore.integrations.transformers.prompts import Prompts, read_prompts
from kvstore.integrations.transformers.staging import CacheRow, Staging
from kvstore.integrations.transformers.stats import PrefixCacheStats
from kvstore.integrations.transformers.supported import check_mode, check_supported
from kvstore.integrations.transformers.witness import Witness

#: More is no size of a buffer, but a mistake.
_MOST_STAGING_BYTES = 1 << 48

logger = logging.getLogger(__name__)


class PrefixCachedModel:
    """A Hugging Face decoder model with a prefix cache.

    `generate` loads the KV of each prompt's longest stored prefix. The model computes the rest, at least the last
    token. The prompt's full blocks are saved once the first new token is out. KV that the store cannot give is
    computed: no failure of the store fails a `generate`. The first of several failures in a row is logged as a
    warning; the store is tried again after `retry_s`.

    Threads may share it as far as they may share the model: loads and saves take turns, the model runs are
    not serialised. It must not be sent to other processes; each process makes its own around the same store.

    Args:
        model: a decoder model in eval mode, with full attention or a sliding window in every layer. Its weights must
            not change while it is wrapped; a change is noticed where torch counts writes.
        store: as `kvstore.start` or `kvstore.connect` returns it.
        block_size: tokens per block; only full blocks are shared.
        model_id: a name of exactly these weights, in every process that shares; spares reading the weights. None takes
            the digest of all weights (`identity.namespace_of` says why of all).
        salt: separates tenants that must not see what others have asked.
        tenant: whose quotas in the store count for this model; "" is the shared tenant, which has none.
        save_generated: also save the blocks of the answer, for the next turn of a conversation. Their KV was computed
            token by token and differs in rounding from that of a prefill.
        staging_bytes: of the buffer between the cache and the store, on the device of the KV, such as "64MiB" or a
            number; at least two blocks.
        load_timeout_s: how long blocks of other nodes may take, up to a day; the store's configured time when None.
        retry_s: how long the store is left alone after a failure, up to a day.

    Raises:
        UnsupportedModel: KV of this model cannot be shared yet; the message says what can.
        InvalidRequest: the model is in training mode, autocast is on, or an argument is of another type or range.
        StoreNotRunning: there is no store on this node.
        ConfigError: transformers is too old, an argument cannot work, or the store's slots are too small for these
            blocks.
    """

    def __init__(
        self,
        model: Any,
        store: StoreLike,
        *,
        block_size: int = 16,
        model_id: str | None = None,
        salt: bytes = b"",
        tenant: str = "",
        save_generated: bool = False,
        staging_bytes: str | int = 64 << 20,
        load_timeout_s: float | None = None,
        retry_s: float = 30.0,
    ) -> None:
        # `generate` of a compiled module runs the module inside it, and then only that module's hooks run.
        model = getattr(model, "_orig_mod", model)
        check_supported(model)
        if not callable(getattr(store, "client", None)):
            raise InvalidRequest(
                f"store: wanted what kvstore.start or kvstore.connect returns, got a {type(store).__name__}"
            )
        if model_id is not None and not (isinstance(model_id, str) and model_id):
            raise InvalidRequest(f"model_id: wanted a name that only these weights have, or None, got {model_id!r:.60}")
        if not isinstance(save_generated, bool):
            raise InvalidRequest(f"save_generated: wanted True or False, got {save_generated!r:.60}")
        if load_timeout_s is not None:
            load_timeout_s = check_seconds("load_timeout_s", load_timeout_s)
        retry_s = check_seconds("retry_s", retry_s)
        num_staging_bytes = check_count("staging_bytes", parse_bytes(staging_bytes), 0, _MOST_STAGING_BYTES)
        check_mode(model)
        shape, self._device = kv_shape(model, block_size)
        num_staged = num_staging_bytes // shape.block_bytes // 2
        if num_staged < 1:
            raise ConfigError(
                f"staging_bytes: wanted at least two blocks, {2 * shape.block_bytes}, got {staging_bytes}; give more, "
                "or take a smaller block_size"
            )
        self._can_pad = can_pad(model, self._device)
        self.model, self._snapshot = model, Snapshot(model, is_named=model_id is not None)
        is_private = bool(tenant) and store.config.private_tenants
        self.space = space_of_tenant(namespace_of(model, shape, model_id, salt), tenant, is_private=is_private)
        self._save_generated, self._load_timeout_s = save_generated, load_timeout_s
        self._stats, self._stats_lock = PrefixCacheStats(), threading.Lock()
        self.link = StoreLink(store, self.space, num_staged, self._device, retry_s, tenant)

    @property
    def stats(self) -> PrefixCacheStats:
        """The counts so far."""
        link = self.link
        return replace(self._stats, num_store_failures=link.num_failures, num_bypassed=link.num_bypassed)

    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Run `model.generate` with the KV of stored prefixes, and return its result.

        Beams, sampling, streamers, stopping criteria, chunked prefill and all settings pass through.

        Args:
            inputs: token ids, [batch, tokens], padded on the left if lengths differ; or `input_ids=` by name.
            options: all other arguments of `model.generate`. Inputs of the model other than input_ids and
                attention_mask, such as images or embeddings, and other caches are refused: the tokens alone would
                not name that KV.

        Raises:
            InvalidRequest: an argument is refused, padding is not on the left, or the model's weights or mode changed.
            UnsupportedModel: the model got a setting or a hook meanwhile that cannot be told from others.
            StoreUnavailable: this object was closed.
        """
        self._check_open()
        self._snapshot.check(self.model)
        prompts, options = read_prompts(self.model, inputs, options, can_pad=self._can_pad)
        rows = [self.space.block_hashes(prompts.tokens(row)) for row in range(len(prompts.num_padding))]
        cache = new_cache(self.model)
        began_s = time.perf_counter()
        planes, width = Planes(), 0
        if prompts.may_load:
            planes, width = self.link.use(lambda staging: self._load(staging, prompts, rows), (planes, width))
        num_loaded = [max(0, width - padding) for padding in prompts.num_padding]
        if width:
            for layer, (keys, values) in enumerate(planes):
                cache.update(keys[:, :, :width], values[:, :, :width], layer)
            planes.clear()  # The cache has copies.
            if prompts.num_copies > 1:
                cache.batch_repeat_interleave(prompts.num_copies)
        self._count(
            num_requests=len(rows),
            num_prompt_tokens=sum(prompts.width - padding for padding in prompts.num_padding),
            num_loaded_tokens=sum(num_loaded),
            load_s=time.perf_counter() - began_s,
        )
        first = [tokens // self.space.shape.block_size for tokens in num_loaded]
        sees_answer = self._save_generated and prompts.follows_rows
        witness = Witness(self.model, cache, prompts, width, sees_answer=sees_answer)

        @functools.cache  # It is called once at most.
        def save_prompt() -> None:
            self._save(prompts, rows, cache, first, witness.num_right())
            if not sees_answer:
                keep_windows_only(cache)

        criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), AfterFirstToken(save_prompt)])
        try:
            with witness:
                output = self.model.generate(
                    prompts.input_ids.clone(),  # Streamers and processors get it, and may change it.
                    attention_mask=prompts.attention_mask.clone(),
                    stopping_criteria=criteria,
                    **{CACHE_NAME: cache},
                    **options,
                )
        finally:
            witness.close()  # Once more: an interrupt may come before the context has begun.
        save_prompt()
        if sees_answer:
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            # generate's own copy of the prompt can be edited.
            sequences = torch.cat([prompts.input_ids, sequences[:, prompts.width :]], 1)
            # The last token was chosen, but its KV was never computed.
            num_columns = min(cache.get_seq_length(), sequences.shape[1] - 1)
            answered = [
                self.space.block_hashes(sequences[row, padding:num_columns].cpu())
                for row, padding in enumerate(prompts.num_padding)
            ]
            num_prompt_blocks = [len(hashes) for hashes in rows]
            self._save(prompts, answered, cache, num_prompt_blocks, witness.num_right_of(sequences))
            keep_windows_only(cache)
        return output

    def close(self) -> None:
        """Give everything back to the store; may be called again. The model stays as it is."""
        self.link.close()

    def __enter__(self) -> PrefixCachedModel:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Loading and saving; the buffer's lock is held.

    def _load(self, staging: Staging, prompts: Prompts, rows: list[BlockHashes]) -> tuple[Planes, int]:
        """Load the columns that all rows have; returns per-layer (K, V), and how many of their columns are right.

        A cache is a rectangle, so the row with the fewest stored columns decides for all.
        """
        size = self.space.shape.block_size
        # At least the last token is computed: its logits choose the first new one.
        wanted = [
            staging.num_stored(hashes[: (prompts.width - padding - 1) // size])
            for hashes, padding in zip(rows, prompts.num_padding, strict=True)
        ]
        width = min(padding + num * size for padding, num in zip(prompts.num_padding, wanted, strict=True))
        needed = [max(0, -(-(width - padding) // size)) for padding in prompts.num_padding]
        if not any(needed):
            return [], 0
        longest = max(padding + num * size for padding, num in zip(prompts.num_padding, needed, strict=True))
        planes = self.empty_planes(len(rows), longest)
        for row, (hashes, padding, num_blocks) in enumerate(zip(rows, prompts.num_padding, needed, strict=True)):
            for pair in planes:
                for plane in pair:
                    plane[row, :, :padding] = 0  # Masked, but 0 times old memory content could be NaN.
            into = CacheRow(planes, row, padding, size)
            loaded = staging.load(hashes[:num_blocks], into.write, self._load_timeout_s)
            width = min(width, padding + loaded * size)
        return planes, width

    def _save(
        self, prompts: Prompts, rows: list[BlockHashes], cache: DynamicCache, first: list[int], num_right: int
    ) -> None:
        """Save each row's blocks from `first` on, as far as they lie in the `num_right` leading columns."""
        size = self.space.shape.block_size
        known = [
            hashes[: max(0, num_right - padding) // size]
            for hashes, padding in zip(rows, prompts.num_padding, strict=True)
        ]
        why, planes = "decoding filled the cache with something else", Planes()
        try:
            self._snapshot.check(self.model)  # Since the call began; it may have been of both models.
            if any(len(sure) > begin for sure, begin in zip(known, first, strict=True)):
                planes = planes_of(cache)
        except (InvalidRequest, UnsupportedModel, LayoutMismatch) as error:
            why, known = str(error), [hashes[:0] for hashes in rows]
        num_unsure = sum(
            max(0, len(hashes) - max(begin, len(sure))) for hashes, sure, begin in zip(rows, known, first, strict=True)
        )
        if num_unsure:
            logger.warning("%d blocks of a prompt or answer are not saved: %s", num_unsure, why)
            self._count(num_unsaved_blocks=num_unsure)
        if not any(known):
            return
        began_s = time.perf_counter()
        written, refused = self.link.use(
            lambda staging: self._save_rows(staging, prompts, known, planes, first), (0, 0)
        )
        self._count(num_saved_blocks=written, num_refused_blocks=refused, save_s=time.perf_counter() - began_s)

    def _save_rows(
        self, staging: Staging, prompts: Prompts, rows: list[BlockHashes], planes: Planes, first: list[int]
    ) -> tuple[int, int]:
        seen: set[bytes] = set()
        num_written = num_refused = 0
        for row, (hashes, begin) in enumerate(zip(rows, first, strict=True)):
            while begin < len(hashes) and hashes[begin] in seen:
                begin += 1  # Another row of this batch has saved it.
            if begin >= len(hashes):
                continue
            at = row * prompts.num_copies
            out_of = CacheRow(planes, at, prompts.num_padding[row], self.space.shape.block_size)
            written, refused = staging.save(hashes, begin, out_of.read)
            num_written, num_refused = num_written + written, num_refused + refused
            seen.update(hashes)
        return num_written, num_refused

    def _check_open(self) -> None:
        if self.link.closed:
            raise StoreUnavailable("wanted an open PrefixCachedModel, got a closed one; make a new one")

    def empty_planes(self, num_rows: int, width: int) -> Planes:
        """Return a K and a V tensor [num_rows, H, width, D] of each layer, on the model's device, not written."""
        shape = self.space.shape
        dims, dtype = (num_rows, shape.num_kv_heads, width, shape.head_dim), getattr(torch, shape.dtype)
        empty = partial(torch.empty, dims, dtype=dtype, device=self._device)
        return [(empty(), empty()) for _ in range(shape.num_layers)]

    def _count(self, **more: float) -> None:
        with self._stats_lock:
            sums = {name: getattr(self._stats, name) + value for name, value in more.items()}
            self._stats = replace(self._stats, **sums)
