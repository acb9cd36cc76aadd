"""Ray Serve: `PrefixRouter` for any deployment of LLM replicas, and `register()` for apps of `ray.serve.llm`.

docs/serve.md has a whole app. Only router.py and backend.py import Ray Serve; nothing here imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.integrations.serve.backend import register
    from kvstore.integrations.serve.router import PrefixRouter

__all__ = ["PrefixRouter", "register"]


def __getattr__(name: str) -> Any:
    # The other modules work without Ray Serve's own dependencies.
    if name == "PrefixRouter":
        from kvstore.integrations.serve.router import PrefixRouter

        return PrefixRouter
    if name == "register":
        from kvstore.integrations.serve.backend import register

        return register
    raise AttributeError(f"module 'kvstore.integrations.serve' has no attribute {name!r}")
