"""KV cache events of what came into the store, as vLLM publishes them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored

from kvstore.blocks.hashing import BlockHashes, Namespace


def stored_event(space: Namespace, request: Any, hashes: BlockHashes) -> Any:
    """Return the event of a run of blocks, from the root on; fields that this vLLM does not know are left out.

    The hashes are the store's own, of the stored block size, and so not those of vLLM's own events.
    """
    size = space.shape.block_size
    fields = {
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(request.all_token_ids[: len(hashes) * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": request.lora_request.lora_name if request.lora_request else None,
        "locality": "LOCAL",
    }
    known = BlockStored.__struct_fields__
    return BlockStored(**{name: value for name, value in fields.items() if name in known})
