"""KV cache events for blocks that came into the store, in vLLM's format."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored

from kvstore.blocks.hashing import BlockHashes, Namespace


def stored_event(space: Namespace, request: Any, hashes: BlockHashes) -> Any:
    """Return the event of a run of blocks, from the root on; fields that this vLLM does not know are left out.

    The hashes are the store's, of the stored block size; they differ from those in vLLM's own events.
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
