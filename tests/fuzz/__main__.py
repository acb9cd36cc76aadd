"""Send frames made wrong to a cluster in this process; exit status 1 when something was found."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import tempfile

from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance


def main() -> int:
    """Run, and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000, help="at least 50, which warm up")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one is printed")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of a line")
    arguments = parser.parse_args()
    if arguments.frames < 50:
        parser.error(f"--frames: wanted 50 or more, got {arguments.frames}")
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    _say(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="rkf", dir="/tmp") as folder:
        os.environ["RAYKV_SOCKET_DIR"] = folder
        logging.basicConfig(filename=f"{folder}/log", level=logging.WARNING)
        sys.setswitchinterval(1e-4)  # As a node store's process does.
        from tests.fuzz.run import fuzz, keep_no_freed_memory

        keep_no_freed_memory()
        outcome = fuzz(seed, arguments.frames, _say)
    if arguments.json:
        sys.stdout.write(as_document(outcome.to_json() | {"provenance": provenance()}))
    else:
        found = "".join(f"\n{finding}" for finding in outcome.findings)
        sys.stdout.write(f"{sum(outcome.frames.values())} frames, {len(outcome.findings)} findings{found}\n")
    sys.stdout.flush()
    # Threads of a cluster that has met all this are not waited for.
    os._exit(1 if outcome.findings else 0)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
