"""A model whose `generate` takes the KV of known prefixes out of a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvstore.errors import InvalidRequest, LayoutMismatch, StoreUnavailable
from kvstore.hashing import BlockHashes
from kvstore.integrations.transformers.identity import (
    check_supported,
    check_unadapted,
    check_version,
    check_weights_unchanged,
    kv_shape,
    namespace_of,
    new_cache,
    weights_marks,
)
from kvstore.integrations.transformers.link import StoreLike, StoreLink
from kvstore.integrations.transformers.prompts import Prompts, read_prompts
from kvstore.integrations.transformers.staging import Staging, rows_into, rows_out_of
from kvstore.integrations.transformers.stats import PrefixCacheStats

Planes = list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCachedModel:
    """A Hugging Face decoder model with a prefix cache.

    `generate` loads the KV of the longest stored prefix of each prompt, has the model compute the rest, at least
    the last token, and saves the prompt's full blocks once the first new token is out. What the store cannot give
    is computed: no failure of the store fails a `generate`. The first of a row of failures is logged as a warning;
    the store is tried again after `retry_s`.

    Threads may share it as far as they may share the model: loads and saves take turns, the model runs are
    not serialised. It must not be sent to other processes; each makes its own around the same store.

    Args:
        model: a decoder model in eval mode, with full attention in every layer. Its weights must not change while it
            is wrapped; that is noticed where torch counts writes.
        store: of `kvstore.start` or `kvstore.connect`.
        block_size: tokens per block; only full blocks are shared.
        model_id: names exactly these weights, for every process that is to share; the digest of all
            weights when None (`identity.namespace_of` says why it is of all). Spares reading the weights.
        salt: keeps tenants apart who must not see what others have asked.
        save_generated: also save the blocks of the answer, for the next turn of a conversation. Their KV was computed
            token by token and differs in rounding from that of a prefill.
        staging_bytes: of the buffer between the cache and the store, on the device of the KV; at least two blocks.
        load_timeout_s: how long blocks of other nodes may take; the store's configured time when None.
        retry_s: how long the store is left alone after a failure.

    Raises:
        UnsupportedModel: KV of this model cannot be shared yet; the message says what can.
        InvalidRequest: the model is in training mode, or autocast is on.
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
        save_generated: bool = False,
        staging_bytes: int = 64 << 20,
        load_timeout_s: float | None = None,
        retry_s: float = 30.0,
    ) -> None:
        check_version(transformers.__version__)
        _check_mode(model)
        check_supported(model)
        shape, self._device = kv_shape(model, block_size)
        self.model = model
        self.space = namespace_of(model, shape, model_id, salt)
        self._marks = weights_marks(model)
        self._save_generated, self._load_timeout_s = save_generated, load_timeout_s
        self._stats, self._stats_lock = PrefixCacheStats(), threading.Lock()
        num_staged = max(1, staging_bytes // shape.block_bytes // 2)
        self._link = StoreLink(store, self.space, num_staged, self._device, retry_s)

    @property
    def stats(self) -> PrefixCacheStats:
        """The counts so far."""
        link = self._link
        return replace(self._stats, num_store_failures=link.num_failures, num_bypassed=link.num_bypassed)

    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Do what `model.generate` does, with the KV of stored prefixes; returns what it returns.

        Beams, sampling, streamers, stopping criteria, chunked prefill and all settings pass through.

        Args:
            inputs: token ids, [batch, tokens], padded on the left where they are unlike; or `input_ids=` by name.
            options: all other arguments of `model.generate`. Inputs of the model other than input_ids and
                attention_mask, such as images or embeddings, and other caches are refused: the tokens alone would
                not name that KV.

        Raises:
            InvalidRequest: such an argument; padding that is not on the left; the model's weights or mode changed.
            UnsupportedModel: a PEFT adapter was added meanwhile.
            StoreUnavailable: this object was closed.
        """
        if self._link.closed:
            raise StoreUnavailable("wanted an open PrefixCachedModel, got a closed one; make a new one")
        _check_mode(self.model)
        check_unadapted(self.model)
        check_weights_unchanged(self.model, self._marks)
        prompts, options = read_prompts(self.model, inputs, options)
        rows = [self.space.block_hashes(prompts.tokens(row)) for row in range(len(prompts.num_padding))]
        cache = new_cache(self.model)
        began_s = time.perf_counter()
        nothing: tuple[Planes, int] = ([], 0)
        planes, width = self._link.use(lambda staging: self._load(staging, prompts, rows), nothing)
        num_loaded = [max(0, width - padding) for padding in prompts.num_padding]
        if width:
            for layer, (keys, values) in enumerate(planes):
                cache.update(keys[:, :, :width], values[:, :, :width], layer)
            if prompts.num_copies > 1:
                cache.batch_repeat_interleave(prompts.num_copies)
        self._count(
            num_requests=len(rows),
            num_prompt_tokens=sum(prompts.width - padding for padding in prompts.num_padding),
            num_loaded_tokens=sum(num_loaded),
            load_s=time.perf_counter() - began_s,
        )
        first = [tokens // self.space.shape.block_size for tokens in num_loaded]
        save = _Once(lambda: self._save(prompts, rows, cache, first))
        criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), _AfterFirstToken(save)])
        output = self.model.generate(
            prompts.input_ids,
            attention_mask=prompts.attention_mask,
            past_key_values=cache,
            stopping_criteria=criteria,
            **options,
        )
        save()
        if self._save_generated and prompts.follows_rows:
            self._save_answers(prompts, rows, cache, output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def close(self) -> None:
        """Give everything back to the store; may be called again. The model stays as it is."""
        self._link.close()

    def __enter__(self) -> PrefixCachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Loading and saving; the buffer's lock is held.

    def _load(self, staging: Staging, prompts: Prompts, rows: list[BlockHashes]) -> tuple[Planes, int]:
        """Load the columns that all rows have; returns per-layer (K, V), and how many of their columns are right.

        A cache is a rectangle: the row that knows least, counted in columns, decides for all.
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
        planes = self._empty_planes(len(rows), longest)
        for row, (hashes, padding, num_blocks) in enumerate(zip(rows, prompts.num_padding, needed, strict=True)):
            for pair in planes:
                for plane in pair:
                    plane[row, :, :padding] = 0  # Masked, but 0 times what lay in memory could be NaN.
            write = rows_into(planes, row, padding, size)
            loaded = staging.load(hashes[:num_blocks], write, self._load_timeout_s)
            width = min(width, padding + loaded * size)
        return planes, width

    def _save(self, prompts: Prompts, rows: list[BlockHashes], cache: DynamicCache, first: list[int]) -> None:
        """Save the blocks [first, ..) of each row that the cache holds."""
        began_s = time.perf_counter()
        written, refused = self._link.use(lambda staging: self._save_rows(staging, prompts, rows, cache, first), (0, 0))
        self._count(num_saved_blocks=written, num_refused_blocks=refused, save_s=time.perf_counter() - began_s)

    def _save_rows(
        self, staging: Staging, prompts: Prompts, rows: list[BlockHashes], cache: DynamicCache, first: list[int]
    ) -> tuple[int, int]:
        planes: Planes = [(layer.keys, layer.values) for layer in cache.layers]
        # A copy would convert: an autocast inside the model may give KV of another dtype than it gave at first.
        if (dtypes := {plane.dtype for pair in planes for plane in pair}) != {getattr(torch, self.space.shape.dtype)}:
            raise LayoutMismatch(f"wanted KV of {self.space.shape.dtype} as at first, got {dtypes}; nothing is saved")
        seen: set[bytes] = set()
        num_written = num_refused = 0
        for row, (hashes, begin) in enumerate(zip(rows, first, strict=True)):
            while begin < len(hashes) and hashes[begin] in seen:
                begin += 1  # Another row of this batch has it.
            if begin == len(hashes):
                continue
            read = rows_out_of(planes, row * prompts.num_copies, prompts.num_padding[row], self.space.shape.block_size)
            written, refused = staging.save(hashes, begin, read)
            num_written, num_refused = num_written + written, num_refused + refused
            seen.update(hashes)
        return num_written, num_refused

    def _save_answers(
        self, prompts: Prompts, rows: list[BlockHashes], cache: DynamicCache, sequences: torch.Tensor
    ) -> None:
        # The last token was chosen, but never computed.
        num_columns = min(cache.get_seq_length(), sequences.shape[1] - 1)
        answered = [
            self.space.block_hashes(sequences[row, padding:num_columns].cpu())
            for row, padding in enumerate(prompts.num_padding)
        ]
        self._save(prompts, answered, cache, [len(hashes) for hashes in rows])

    def _empty_planes(self, num_rows: int, width: int) -> Planes:
        shape = self.space.shape
        dims, dtype = (num_rows, shape.num_kv_heads, width, shape.head_dim), getattr(torch, shape.dtype)
        return [
            (torch.empty(dims, dtype=dtype, device=self._device), torch.empty(dims, dtype=dtype, device=self._device))
            for _ in range(shape.num_layers)
        ]

    def _count(self, **more: float) -> None:
        with self._stats_lock:
            sums = {name: getattr(self._stats, name) + value for name, value in more.items()}
            self._stats = replace(self._stats, **sums)


class _Once:
    """A call that is made at most once."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class _AfterFirstToken(StoppingCriteria):
    """Stops nothing; calls when the second token was chosen, so that the first one did not have to wait."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._num_tokens = call, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._num_tokens += 1
        if self._num_tokens == 2:
            self._call()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _check_mode(model: Any) -> None:
    if model.training:
        raise InvalidRequest(
            "wanted a model in eval mode, got one in training mode, whose KV is random; call model.eval()"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise InvalidRequest(
            "wanted KV in the model's own dtype, got autocast on; load the model in that dtype, or leave the context"
        )
