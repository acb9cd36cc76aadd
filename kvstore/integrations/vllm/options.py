"""The user's settings in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from kvstore.errors import ConfigError


class SavePolicy(Enum):
    """Which blocks an engine gives to the store."""

    PROMPT = "prompt"
    """Full blocks of the prompt."""

    ALL = "all"
    """Full blocks of prompt and answer: the next turn of a conversation begins with them."""

    NONE = "none"
    """No blocks; the engine only loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keys of `kv_connector_extra_config`; unknown keys are refused.

    Args:
        store: name of the store.
        address: of the store's Ray cluster, as for `kvstore.connect`; None finds the cluster that runs here.
        node_id: another node whose store shares this machine, in a cluster simulated on one host.
        model: name of the weights, for engines that know them under different paths or names; None takes vLLM's.
        salt: engines with different salts share nothing.
        tenant: whose quotas in the store count for this engine; "" is the shared tenant, which has none.
        block_size: tokens of a stored block, a multiple or a divisor of the engine's block size; 0 takes that size.
        portable: on a CPU, store rows of tokens and not blocks in the attention kernel's order. Engines with other
            block sizes can then share, at the price of a second cache and slower copies. GPUs always store rows.
        num_layer_groups: of the stored block, a multiple of each sharing engine's pipeline size; 0 takes this engine's.
        axes: names the dims of the engine's tensors where their sizes leave a choice (docs/layouts.md).
        save: a `SavePolicy`, or its value.
        remote: also use blocks that only other nodes have.
        lookup_wait_s: how long the store may take for one answer before requests are computed without it.
        load_timeout_s: a load or fetch that takes longer than this has failed.
        handoff_ttl_s: how long a prefilled request's blocks are kept for the engine that decodes it.
        handoff_staging: bytes of the GPU's memory through which hand-offs go from GPU to GPU; 0: through host memory.
        trust_media_uuids: take the `uuid` that a client gave to an image or other medium for its content. Without it,
            the processed data count as well.
        prefill_tokens_per_s: how fast this engine computes prompts. Blocks on disk that would take longer to read are
            computed. 0: not known, and they are always read.

    Raises:
        ConfigError: a value cannot work.
    """

    store: str = "default"
    address: str | None = None
    node_id: str | None = None
    model: str | None = None
    salt: str = ""
    tenant: str = ""
    block_size: int = 0
    portable: bool = False
    num_layer_groups: int = 0
    axes: str | None = None
    save: SavePolicy | str = SavePolicy.PROMPT
    remote: bool = True
    lookup_wait_s: float = 0.5
    load_timeout_s: float = 5.0
    handoff_ttl_s: float = 60.0
    handoff_staging: int = 0
    trust_media_uuids: bool = False
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("store", "salt", "tenant"):
            _require(isinstance(getattr(self, name), str), name, "text", getattr(self, name))
        for name in ("address", "node_id", "model", "axes"):
            _require(isinstance(getattr(self, name), str | None), name, "text", getattr(self, name))
        for name in ("block_size", "num_layer_groups", "handoff_staging"):
            value = getattr(self, name)
            _require(type(value) is int and value >= 0, name, "a whole number of at least 0", value)
        for name in ("lookup_wait_s", "load_timeout_s", "handoff_ttl_s"):
            value = getattr(self, name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3600
            _require(fits, name, "seconds above 0, below 3600", value)
        rate = self.prefill_tokens_per_s
        fits = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < 1e12
        _require(fits, "prefill_tokens_per_s", "tokens per second, 0 or more", rate)
        for name in ("portable", "remote", "trust_media_uuids"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))
        try:
            object.__setattr__(self, "save", SavePolicy(self.save))
        except ValueError:
            _require(False, "save", " or ".join(repr(policy.value) for policy in SavePolicy), self.save)

    @staticmethod
    def parse(extra: Mapping[str, Any]) -> Options:
        """Return the options that a user wrote.

        Raises:
            ConfigError: a key is unknown, or a value cannot work.
        """
        known = [field.name for field in fields(Options)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(f"kv_connector_extra_config: unknown keys {unknown}; known are {', '.join(known)}")
        return Options(**extra)


def _require(fits: bool, name: str, wanted: str, got: object) -> None:
    if not fits:
        raise ConfigError(f"kv_connector_extra_config[{name!r}]: wanted {wanted}, got {got!r}")
