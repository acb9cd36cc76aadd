"""`kvstore bench control` or `bench transfer` of this version and of another one in turns, on one machine.

Each turn is a whole run of the command by one version, with its own Ray and stores; which version is first alternates.
The figure of a row is the median of its times in all turns of this version over that of the other one, with the least
and the largest ratio of two neighbouring turns. Where `benchmarks/two_versions.py` changes the version after each call,
so that each call begins with cold caches, here each version has the machine for thousands of calls.

Run: `python benchmarks/in_turns.py [--turns N] [--json] FOLDER control|transfer [OPTIONS]`, with a checkout of the
other version in FOLDER; OPTIONS go to the command of both. Times are in microseconds, or 1 / (GB/s).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900.0
#: What a row of `kvstore bench` says of its time; the rest names it.
VALUES = ("p50_us", "p99_us", "gb_per_s", "of_nixl", "load_bytes")


def run_once(folder: Path, command: str, options: list[str]) -> dict[str, float]:
    """Run the command of the version in a folder; return a time for each row, by the row's name."""
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = "from kvstore.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, "bench", command, "--json", *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=TIMEOUT_S,
    )
    if not ran.stdout.strip():
        said = f"status {ran.returncode}:\n{ran.stderr}"
        raise SystemExit(f"`kvstore bench {command}` of the version in {folder} gave no rows, {said}")
    times = {}
    for row in json.loads(ran.stdout):
        name = ", ".join(str(value) for key, value in row.items() if key not in VALUES)
        times[name] = row["p50_us"] if "p50_us" in row else 1.0 / row["gb_per_s"]
    return times


def in_turns(this: Path, other: Path, command: str, num_turns: int, options: list[str]) -> list[dict[str, Any]]:
    turns: list[dict[str, dict[str, float]]] = []
    for number in range(num_turns):
        print(f"\rturn {number + 1} of {num_turns} ", end="", file=sys.stderr, flush=True)
        folders = [("this", this), ("other", other)]
        turns.append({name: run_once(at, command, options) for name, at in (folders if number % 2 else folders[::-1])})
    print(file=sys.stderr)
    rows = []
    for name in turns[0]["this"]:
        times = {of: [turn[of][name] for turn in turns if name in turn[of]] for of in ("this", "other")}
        if not times["other"]:
            continue  # The other version does not measure it.
        ratios = [mine / its for mine, its in zip(times["this"], times["other"], strict=True)]
        ratio = statistics.median(times["this"]) / statistics.median(times["other"])
        row = {"row": name, "ratio": round(ratio, 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}
        rows.append(row | {of: [float(f"{time:.4g}") for time in seen] for of, seen in times.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of the other version")
    parser.add_argument("command", choices=("control", "transfer"))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="for the command")
    parser.add_argument("--turns", type=int, default=5, help="runs of each version")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    if not (arguments.folder / "kvstore").is_dir():
        parser.error(f"wanted a folder with a checkout of raykv, got {arguments.folder}")
    if arguments.turns < 1:
        parser.error(f"--turns: wanted 1 or more, got {arguments.turns}")
    rows = in_turns(HERE, arguments.folder.resolve(), arguments.command, arguments.turns, arguments.options)
    if arguments.json:
        sys.path.insert(0, str(HERE))
        from kvstore.tools.documents import as_document
        from kvstore.tools.provenance import commit, provenance

        about = {"command": arguments.command, "options": arguments.options, "num_turns": arguments.turns}
        about["other_commit"] = commit(arguments.folder)
        print(as_document({"benchmark": "two versions in turns", **provenance(), **about, "rows": rows}), end="")
        return
    print(f"{'row':<30} {'ratio':>7} {'least to most':>15}")
    for row in rows:
        print(f"{row['row']:<30} {row['ratio']:>7.3f} {row['least']:>7.3f}-{row['most']:.3f}")


if __name__ == "__main__":
    main()
