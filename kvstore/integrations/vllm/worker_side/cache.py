"""One rank's cache: the engine's tensors, and the client that they are registered with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.client.client import Client
from kvstore.errors import LayoutMismatch
from kvstore.integrations.vllm.link import StoreLink
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.space import in_order_of_layers, make_space
from kvstore.integrations.vllm.worker_side.interior import TokenRows, order_inside
from kvstore.integrations.vllm.worker_side.publishing import Publishing

logger = logging.getLogger(__name__)


class Cache:
    """The cache of one rank.

    Args:
        options: the user's.
        config: vLLM's.
        spec: of the one KV cache group.
        part: which part of every block this rank holds.
        publishing: hand-offs of this rank; gets each new client.
    """

    def __init__(self, options: Options, config: Any, spec: Any, part: Part, publishing: Publishing) -> None:
        self._options, self._config, self._spec = options, config, spec
        self._part, self._publishing = part, publishing
        #: Namespace of this engine's blocks; None until the tensors are registered, through `link`.
        self.space: Namespace | None = None
        self.link: StoreLink
        #: A second cache whose blocks are copied, in rows of tokens; None where the engine's own is.
        self.rows: TokenRows | None = None
        self.is_on_gpu = False
        self._pages_in_block = 1

    def register(self, caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors, derive the blocks' namespace from them, and connect to the store.

        Raises:
            StoreNotRunning: there is no store on this node.
            LayoutMismatch, ConfigError: the store cannot hold these tensors; the message says what to change.
        """
        if self.space is not None:  # After the engine slept, its tensors may be different.
            self.link.close()
        found = in_order_of_layers(caches)
        tensors, axes = list(found.values()), self._options.axes
        order = order_inside(self._config, next(iter(found)), tensors[0], self._spec)
        if order and self._options.portable:
            self.rows = TokenRows(tensors, order, int(self._spec.head_size))
            tensors, axes, order = self.rows.tensors, "BPHTD", ""
        elif order:  # The sizes alone may be ambiguous.
            axes = axes or ("BHTD" if tensors[0].dim() == 4 else "PBHTD")
        space = make_space(self._config, self._spec, self._options, tensors, order)
        self._part.check(space.shape)

        def register(client: Client) -> None:
            try:
                layout = client.register_kv_caches(tensors, axes)
            except LayoutMismatch as error:
                raise LayoutMismatch(f"{error}. In vLLM, axes are kv_connector_extra_config['axes']") from error
            if int(self._spec.block_size) % layout.block_size:
                raise LayoutMismatch(
                    f"RaykvConnector: wanted tensors with pages that divide a block of {self._spec.block_size} tokens, "
                    f"got pages of {layout.block_size}; set kv_connector_extra_config['axes']"
                )
            self._pages_in_block = int(self._spec.block_size) // layout.block_size
            self._publishing.attach(client, layout.device)
            self.is_on_gpu = torch.device(layout.device).type == "cuda"
            logger.info(
                "%d pages of %d tokens, axes %s, on %s; stored blocks of %d tokens and %d bytes, namespace %s",
                layout.num_blocks, layout.block_size, layout.axes, layout.device,
                space.shape.block_size, space.shape.block_bytes, space.digest.hex()[:16],
            )  # fmt: skip

        self.link = StoreLink(self._options, space, self._part, (register,))
        self.space = self.link.space

    def client(self) -> Client | None:
        """Return the client of this rank's node store; None while no store is reached."""
        return self.link.client() if self.space is not None else None

    def pages(self, block_ids: list[int]) -> list[int]:
        """Return the tensor pages that make up vLLM's blocks: an attention kernel may want smaller pages."""
        count = self._pages_in_block
        return block_ids if count == 1 else [block * count + page for block in block_ids for page in range(count)]
