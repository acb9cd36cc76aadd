"""Runs the checks against mutants: the pool with one historical bug each. Every one has to be caught.

python -m poolcheck.mutants [--json] [--vllm] [NAME ...]

Each mutant is checked in a child process of its own, by the tests that are named for it; then the code as it is
has to pass all of these tests. A mutant whose text is not in the code any more, or that fails for another reason
than its bug, is an error and no catch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from poolcheck.mutant import Mutant
from poolcheck.mutations import MUTANTS
from poolcheck.mutations_vllm import CONNECTOR
from poolcheck.patch import DoesNotApply, check, install

_ROOT = Path(__file__).parents[3]
#: For the tests of one mutant, and for those of all of them on the code as it is.
_TIMEOUT_S, _WHOLE_TIMEOUT_S = 120.0, 600.0
#: What the tests of most mutants import, and what those of the integration with transformers do besides.
_PRELOADED = ("hypothesis.stateful", "llvmlite.binding", "msgspec", "numpy", "pytest", "pytest_timeout", "torch")
_INTEGRATION = "tests/integrations/transformers"
_TRANSFORMERS = ("transformers.generation.utils", "transformers.models.auto.modeling_auto")
_PRELOADED_VLLM = ("msgspec", "numpy", "pytest", "pytest_timeout", "vllm.v1.core.sched.scheduler", "xxhash")
#: What a mutant that is broken Python raises; that some test fails then says nothing.
_BROKEN = (NameError, ImportError, SyntaxError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one mutant, or of the code as it is.

    Args:
        caught_by: tests that failed, in the order they ran.
        why: the first line of what the first of them said.
        error: why this says nothing about the checks; empty when it does.
    """

    name: str
    source: str
    caught_by: tuple[str, ...] = ()
    why: str = ""
    error: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class _Watch:
    """A plugin of pytest that notes what ran and what failed how."""

    num_passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            self.num_passed += call.when == "call"
            return
        error: BaseException | None = call.excinfo.value
        text = ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[0]
        if call.when != "call":
            self.error = self.error or f"{item.nodeid}: {call.when} failed: {text}"
            return
        while error is not None:
            if isinstance(error, _BROKEN):
                self.error = f"{item.nodeid}: the mutant is no program: {error!r}"
            error = error.__cause__
        self.failed.append((item.nodeid, text))


def run_tests(tests: Sequence[str], *, stop_at_failure: bool) -> _Watch:
    """Run tests in this process."""
    import pytest

    watch = _Watch()
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={_ROOT}", *(["-x"] * stop_at_failure)]
    # The parent of this process has imported what pytest would like to import itself.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    # Nor does it load what else is installed, or look for garbage at the end: that takes longer than most tests here.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments += ["-p", "pytest_timeout", "-p", "no:unraisableexception"]
    # `watch` has the error itself; a long traceback with its sources takes as long as the test, and nobody reads it.
    arguments += ["--tb=native"]
    code = pytest.main([*arguments, *(f"{_ROOT}/{test}" for test in tests)], plugins=[watch])
    if code not in (0, 1) and not watch.error:
        watch.error = f"pytest ended with {code!r}"
    return watch


class _Child:
    """A forked process that changes the code and runs the tests; this one has imported nothing of kvstore."""

    def __init__(self, mutant: Mutant | None, tests: Sequence[str]) -> None:
        self.name, self.source = (mutant.name, mutant.source) if mutant else ("the code as it is", "")
        self._timeout_s = _TIMEOUT_S if mutant else _WHOLE_TIMEOUT_S
        self._begun_s = time.monotonic()
        self._answer, self._log = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._run(mutant, tests)

    def _run(self, mutant: Mutant | None, tests: Sequence[str]) -> NoReturn:
        code = 1
        try:
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)
            os.chdir(_ROOT)
            if mutant is not None:
                os.environ["POOLCHECK_MUTANT"] = mutant.name
                install(mutant.patches)
            watch = run_tests(tests, stop_at_failure=mutant is not None)
            self._answer.write(pickle.dumps(watch))
            self._answer.flush()
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def verdict(self) -> Verdict | None:
        """Return what came of it, None while it runs."""
        seconds = time.monotonic() - self._begun_s
        if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if seconds < self._timeout_s:
                return None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._answer.seek(0)
        self._log.seek(0)
        data, log = self._answer.read(), self._log.read().decode(errors="replace").strip()
        self._answer.close()
        self._log.close()
        if not data:
            how = f"no answer after {seconds:.0f} s, last words: {(log.splitlines() or ['none'])[-1]}"
            return Verdict(name=self.name, source=self.source, error=how, seconds=seconds)
        watch: _Watch = pickle.loads(data)
        error = watch.error
        if not error and not watch.failed and not watch.num_passed:
            error = "no test ran"
        return Verdict(
            name=self.name,
            source=self.source,
            caught_by=tuple(test for test, _ in watch.failed),
            why=watch.failed[0][1] if watch.failed else "",
            error=error,
            seconds=seconds,
        )


def run_all(mutants: Sequence[Mutant], *, whole: bool) -> tuple[list[Verdict], Verdict]:
    """Return what came of each mutant, in order, and of the code as it is under the tests of all of them."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    found = {"the code as it is": Verdict(name="the code as it is", source="")}
    todo: list[Mutant | None] = [None] if whole else []
    for mutant in mutants:
        try:
            check(mutant.patches, _ROOT)
            todo.append(mutant)
        except (DoesNotApply, SyntaxError) as error:
            found[mutant.name] = Verdict(name=mutant.name, source=mutant.source, error=f"does not apply: {error}")
    running: list[_Child] = []
    while todo or running:
        while todo and len(running) < len(os.sched_getaffinity(0)):
            mutant_or_none = todo.pop(0)
            running.append(_Child(mutant_or_none, mutant_or_none.tests if mutant_or_none else tests))
        for child in list(running):
            verdict = child.verdict()
            if verdict is not None:
                running.remove(child)
                found[child.name] = verdict
        time.sleep(0.01)
    return [found[mutant.name] for mutant in mutants], found["the code as it is"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return 0 when all were caught and the code as it is passed."""
    parser = argparse.ArgumentParser(prog="poolcheck.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only-mutants", action="store_true", help="take it that the code as it is passes")
    parser.add_argument("--vllm", action="store_true", help="those of the connector, in an environment with vLLM")
    options = parser.parse_args(arguments)
    mutants = CONNECTOR if options.vllm else MUTANTS
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    # Once for all children; nothing of kvstore, which each child imports in its own way.
    # Read while torch and transformers are imported: threads that wait for work spin, and nothing is to be fetched.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    integrates = any(test.startswith(_INTEGRATION) for mutant in chosen for test in mutant.tests)
    preloaded = _PRELOADED_VLLM if options.vllm else (*_PRELOADED, *(_TRANSFORMERS if integrates else ()))
    for name in preloaded:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "kvstore"], "kvstore is imported already"
    gc.freeze()  # Else each child would look through all of that, too, and copy it.
    verdicts, clean = run_all(chosen, whole=not options.only_mutants)
    num_caught = sum(bool(verdict.caught_by) and not verdict.error for verdict in verdicts)
    passed = not clean.caught_by and not clean.error
    if options.json:
        rows = [{name: getattr(v, name) for name in Verdict.__slots__} for v in verdicts]
        report = {"mutants": rows, "num_caught": num_caught, "num_mutants": len(verdicts), "unmutated_passes": passed}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print_table(verdicts)
        if not passed:
            sys.stdout.write(f"THE CODE AS IT IS FAILS: {clean.error or clean.caught_by} {clean.why}\n")
        sys.stdout.write(f"caught {num_caught}/{len(verdicts)}\n")
    return 0 if passed and num_caught == len(verdicts) else 1


def _print_table(verdicts: Sequence[Verdict]) -> None:
    rows = [("mutant", "seen in", "caught by", "s")]
    for verdict in verdicts:
        caught = verdict.caught_by[0].removeprefix("tests/") if verdict.caught_by else "NOT CAUGHT"
        rows.append((verdict.name, verdict.source, verdict.error or caught, f"{verdict.seconds:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
