"""The settings of a PrefixRouter: the keys of Ray Serve's `request_router_kwargs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.bounds import clip
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.integrations.space_text import space_from_text

_MOST = 1e15
#: As config files may name it, with a dot or a colon before the class.
_ROUTERS = ("kvstore.integrations.serve.PrefixRouter", "kvstore.integrations.serve.router.PrefixRouter")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The keys of `request_router_kwargs`; unknown keys are refused.

    Args:
        tokenizer: folder or name of the engines' model, as transformers and, for chats, vLLM take it.
        chat_template: text of the engines' chat template, if it is not the tokenizer's own.
        store: name of the store whose directory is asked; None asks no store, and hints are all that is used.
        address: of the store's Ray cluster, as for `kvstore.connect`; None is the cluster of this process.
        space: the engines' namespace, as `space_to_text` writes it; None asks a replica for it.
        block_size: tokens of a block until the namespace is known.
        tokenize_wait_s: how long reading one prompt may take; a longer one is routed without a prefix.
        store_wait_s: how long the directory may take for one answer.
        store_pause_s: how long a store that was silent is not asked again.
        hint_ttl_s: how long a replica is expected to have what was routed to it.
        max_hints: blocks that are remembered as routed, in all.
        prefill_tokens_per_s: how fast a replica computes prompts.
        fetch_bytes_per_s: how fast a node gets blocks of another one; 0 where engines do not fetch.
        cache_tokens: that an engine's own cache holds; None asks a replica for it.
        work_weight: how much a prompt's own computing counts besides its first token, because it delays others.
        evict_weight: how much the blocks count that a prompt's new blocks push out, at the replica that has least room.
        decode_tokens: what a running request counts, in tokens of prompts, besides its own prompt.

    Raises:
        ConfigError: a value cannot work.
    """

    tokenizer: str
    chat_template: str | None = None
    store: str | None = "default"
    address: str | None = None
    space: str | None = None
    block_size: int = 16
    tokenize_wait_s: float = 0.2
    store_wait_s: float = 0.05
    store_pause_s: float = 2.0
    hint_ttl_s: float = 300.0
    max_hints: int = 200_000
    prefill_tokens_per_s: float = 10_000.0
    fetch_bytes_per_s: float = 1e9
    cache_tokens: int | None = None
    work_weight: float = 2.0
    evict_weight: float = 6.0
    decode_tokens: float = 0.0

    def __post_init__(self) -> None:
        _require(isinstance(self.tokenizer, str) and self.tokenizer != "", "tokenizer", "a folder or a name", self)
        for name in ("chat_template", "store", "address", "space"):
            _require(isinstance(getattr(self, name), str | None), name, "text or None", self)
        if self.store is not None:
            StoreConfig(name=self.store)
        if self.space is not None:
            try:
                space_from_text(self.space)
            except InvalidRequest as error:
                raise ConfigError(f"request_router_kwargs['space']: {error}") from error
        for name, most in (("block_size", 1 << 16), ("max_hints", 1 << 24)):
            value = getattr(self, name)
            _require(type(value) is int and 0 < value <= most, name, f"a whole number from 1 to {most}", self)
        fits = self.cache_tokens is None or (type(self.cache_tokens) is int and 0 < self.cache_tokens < _MOST)
        _require(fits, "cache_tokens", "a whole number above 0, or None", self)
        for name in ("tokenize_wait_s", "store_wait_s", "store_pause_s", "hint_ttl_s", "prefill_tokens_per_s"):
            _require(_is_number(getattr(self, name), 0) and getattr(self, name) > 0, name, "a number above 0", self)
        for name in ("fetch_bytes_per_s", "work_weight", "evict_weight", "decode_tokens"):
            _require(_is_number(getattr(self, name), 0), name, "a number of at least 0", self)

    @staticmethod
    def parse(given: Mapping[str, Any]) -> RouterOptions:
        """Return the options that a user wrote.

        Raises:
            ConfigError: a key is unknown or missing, or a value cannot work.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"request_router_kwargs: wanted a mapping, got {clip(given)}")
        known = [field.name for field in fields(RouterOptions)]
        if unknown := [key for key in given if key not in known]:
            raise ConfigError(f"request_router_kwargs: unknown keys {clip(unknown)}; known are {', '.join(known)}")
        if "tokenizer" not in given:
            raise ConfigError(
                "request_router_kwargs: wanted the key 'tokenizer', got none; name the folder or model whose tokenizer "
                "the engines use, as prompts reach a router as text"
            )
        return RouterOptions(**given)


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < _MOST


def _require(fits: bool, name: str, wanted: str, options: RouterOptions) -> None:
    if not fits:
        raise ConfigError(f"request_router_kwargs[{name!r}]: wanted {wanted}, got {getattr(options, name)!r}")


def check_routers(args: Any, read: Callable[[str], Any] = lambda path: None) -> Any:
    """Check the options of each `PrefixRouter` in the arguments of a builder of `ray.serve.llm`.

    Args:
        args: of the builder. A config in it may be a mapping, a path, or what Ray makes of these.
        read: returns what Ray makes of a path.

    Returns:
        The arguments, with a list of `llm_configs` in place of what can be looked through once only.

    Raises:
        ConfigError: the arguments are no mapping, or a router would refuse its options.
    """
    if not isinstance(args, Mapping):
        raise ConfigError(f"args: wanted a mapping, as of a Serve config file, got {clip(args)}")
    configs = args.get("llm_configs")
    if isinstance(configs, Iterable) and not isinstance(configs, str | bytes | Mapping):
        configs = list(configs)
        args = {**args, "llm_configs": configs}
    else:
        configs = []  # Ray refuses it, or takes none.
    for given in (args.get("prefill_config"), args.get("decode_config"), *configs):
        config = read(given) if isinstance(given, str) else given
        router = _at(config, "deployment_config", "request_router_config")
        if _is_ours(_at(router, "request_router_class")):
            options = _at(router, "request_router_kwargs")
            RouterOptions.parse({} if options is None else options)
    return args


def _is_ours(router: object) -> bool:
    name = (
        router if isinstance(router, str) else f"{getattr(router, '__module__', '')}.{getattr(router, '__name__', '')}"
    )
    return name.replace(":", ".") in _ROUTERS


def _at(found: Any, *keys: str) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else getattr(found, key, None)
    return found
