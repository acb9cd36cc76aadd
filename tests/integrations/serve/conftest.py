"""The parts of the router that need no Ray Serve; tests/serve has the router itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
