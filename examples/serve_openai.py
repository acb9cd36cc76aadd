"""An OpenAI-compatible app on Ray Serve whose engines share their KV through a store: prefill and decode apart.

Needs no GPU and downloads nothing. `make demo-serve` sets everything up and runs it with --check, which asks the app
some completions and chats and shows where their KV came from. Without --check the app runs until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
import tempfile
from typing import Any

import click
from serve_app import (
    ROUTERS,
    AppOptions,
    private_environment,
    quiet_environment,
    running_app,
    running_store,
    save_model,
)
from serve_check import check, show


def need_serve() -> None:
    """End the program where Ray Serve or vLLM are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("vllm", "fastapi", "openai")):
        sys.exit("vLLM and Ray Serve are not in this environment; `make demo-serve` makes one and runs this example")


@click.command()
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Of each deployment.")
@click.option("--one-deployment", is_flag=True, help="Engines that prefill and decode, instead of two deployments.")
@click.option("--router", type=click.Choice(list(ROUTERS)), default="prefix", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65_535), default=8000, show_default=True)
@click.option("--address", help="Use the Ray cluster here, and its store; otherwise both are started.")
@click.option("--store", default="default", show_default=True, help="Name of the store.")
@click.option("--check", "checks", is_flag=True, help="Ask the app some questions, show what was found, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --check: print the result as one line of JSON.")
def main(address: str | None, checks: bool, as_json: bool, **settings: Any) -> None:
    """Serve a small model with the store behind it."""
    need_serve()
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if address is None:
            private_environment(folder)
        else:
            quiet_environment()
        options = AppOptions(folder=save_model(f"{folder}/model"), address=address, **settings)
        from kvstore.errors import KVStoreError

        try:
            result = run(options, checks)
        except KVStoreError as error:
            sys.exit(f"{type(error).__name__}: {error}")
    if result is None:
        return
    if as_json:
        print(json.dumps(result))
    else:
        show(result)
    if not result["summary"]["ok"]:
        sys.exit("an answer changed, or blocks were not found")


def run(options: AppOptions, checks: bool) -> dict[str, Any] | None:
    """Run the app: until it is checked, and return what came of that, or until Ctrl-C."""
    with running_store(options) as store, running_app(options, store) as url:
        if checks:
            return check(url, store, options.one_deployment)
        print(f"the app answers at {url}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return None


if __name__ == "__main__":
    main()
