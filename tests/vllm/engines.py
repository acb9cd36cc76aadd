"""Starting engines in processes of their own, and asking them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
from pathlib import Path

START_S = 240.0
ANSWER_S = 100.0
#: Importing vLLM takes longer than making an engine, so it is done once, in a process that then forks.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["engine_process"])


def begin_importing():
    """Begin to import vLLM where engines come from; what is in the environment by then counts."""
    multiprocessing.forkserver.ensure_running()


def _serve(*args):
    from engine_process import serve  # where it is imported already

    serve(*args)


class EngineError(Exception):
    """What went wrong in the engine's process."""


class Engine:
    """The near end of one engine; any verb of `EngineProcess` is a method."""

    def __init__(self, model, log, *, has_core_process=False, **settings):
        self._connection, far = _processes.Pipe()
        self._log = Path(log)
        # One with several workers starts processes of its own, which a daemon must not.
        is_alone = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1) == 1
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_core_process))}
        is_alone = is_alone and not has_core_process
        self.process = _processes.Process(target=_serve, args=(far, str(log), environment), daemon=is_alone)
        self.process.start()
        far.close()
        self.begin("start", model, **settings)

    def wait_started(self):
        self.end(START_S)
        return self

    def begin(self, verb, *args, **options):
        """Tell it to do something, and return before that is done."""
        self._connection.send((verb, args, options))

    def end(self, timeout_s=ANSWER_S):
        """Wait for what `begin` began."""
        if not self._connection.poll(timeout_s):
            raise EngineError(f"no answer in {timeout_s} s; the log ends with\n{self.log()}")
        try:
            kind, answer, *more = self._connection.recv()
        except EOFError:
            raise EngineError(f"the engine is gone; its log ends with\n{self.log()}") from None
        if kind == "error":
            raise EngineError(f"{answer}\n{''.join(more)}\n{self.log()}")
        return answer

    def __getattr__(self, verb):
        def ask(*args, **options):
            self.begin(verb, *args, **options)
            return self.end()

        return ask

    def log(self):
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""

    def begin_close(self):
        with contextlib.suppress(OSError):
            self.begin("stop")

    def close(self):
        """Wait until it has ended, after `begin_close`."""
        with contextlib.suppress(EngineError, OSError):
            self.end(30)
        self._connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(20)
