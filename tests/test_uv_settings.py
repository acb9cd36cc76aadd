"""The set-up looks for packages where pip would, with uv."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def script(repo_root):
    return repo_root / "scripts" / "uv_settings.py"


@pytest.fixture(scope="module")
def settings(script):
    spec = importlib.util.spec_from_file_location("uv_settings", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.settings


def test_several_values_stand_as_uv_wants_them(settings):
    listing = "global.extra-index-url='https://a/simple\\nhttps://b/simple'\nglobal.find-links='/one /two'\n"
    found = settings(listing)
    assert found["UV_INDEX"] == "https://a/simple https://b/simple"
    assert found["UV_FIND_LINKS"] == "/one,/two"


def test_the_environment_counts_more_than_files_and_install_more_than_global(settings):
    listing = (
        ":env:.index-url='https://env'\nglobal.index-url='https://global'\n"
        "global.cert='/global'\ninstall.cert='/install'\n"
    )
    found = settings(listing)
    assert (found["UV_DEFAULT_INDEX"], found["SSL_CERT_FILE"]) == ("https://env", "/install")


def test_what_uv_has_no_word_for_is_left_out(settings):
    assert settings(":env:.disable-pip-version-check='1'\n") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_pips_own_settings_are_found_and_uvs_are_kept(script):
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "/wheels", "PIP_CERT": "/pip", "SSL_CERT_FILE": "/mine"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    said = subprocess.run(
        [sys.executable, script], env=inherited | own, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert sorted(said.split()) == ["UV_FIND_LINKS=/wheels", "UV_INDEX_STRATEGY=unsafe-best-match"]
