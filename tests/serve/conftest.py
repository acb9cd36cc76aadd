"""Ray Serve with real vLLM engines on the CPU. Where either is not installed, its tests are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HAS_VLLM = importlib.util.find_spec("vllm") is not None

sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples")]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # those of Ray Serve and vLLM are not ours
            if "app" in item.fixturenames:
                item.add_marker(pytest.mark.timeout(900))
                item.add_marker(pytest.mark.ray)
                item.add_marker(pytest.mark.slow)
                if not HAS_VLLM:
                    item.add_marker(pytest.mark.skip(reason="no vLLM here; `make test-serve` has it"))


@pytest.fixture(scope="session")
def app():
    """An app with one prefill and one decode engine, which all tests share: it takes minutes to start."""
    import tempfile

    import serve_app
    from running import App, free_port

    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        serve_app.private_environment(folder)
        model = serve_app.save_model(f"{folder}/model")
        options = serve_app.AppOptions(folder=model, port=free_port())
        with serve_app.running_store(options) as store, serve_app.running_app(options, store) as url:
            yield App(url, store, model)
