"""Ray Serve: `PrefixRouter` for any deployment of LLM replicas, and `register()` for apps of `ray.serve.llm`.

docs/serve.md has a whole app. Only router.py, backend.py and builders.py import Ray Serve; nothing here imports vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.integrations.serve.backend import register
    from kvstore.integrations.serve.builders import build_openai_app, build_pd_openai_app
    from kvstore.integrations.serve.router import PrefixRouter

__all__ = ["PrefixRouter", "build_openai_app", "build_pd_openai_app", "register"]

_MODULES = {
    "PrefixRouter": "router",
    "build_openai_app": "builders",
    "build_pd_openai_app": "builders",
    "register": "backend",
}


def __getattr__(name: str) -> Any:
    # The other modules work without Ray Serve's own dependencies.
    if name not in _MODULES:
        raise AttributeError(f"module 'kvstore.integrations.serve' has no attribute {name!r}")
    return getattr(import_module(f"kvstore.integrations.serve.{_MODULES[name]}"), name)
