"""What the checks of the pool share. The cluster in one process is the one of tests/kvstore."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parent.parent / "kvstore" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("kvstore_cluster", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["kvstore_cluster"] = _MODULE
_SPEC.loader.exec_module(_MODULE)

socket_folder, cluster, cluster_class, _wait_until = (
    _MODULE.socket_folder,
    _MODULE.cluster,
    _MODULE.cluster_class,
    _MODULE._wait_until,
)
