"""Hold a node's memory between two of its stores, as a Ray actor: it ends with the store, or by itself."""

from __future__ import annotations

import os
import threading
import time

from kvstore.node.handover.holder import Holder as HolderLoop
from kvstore.node.handover.transfer import handover_path

#: After the memory was taken, the caller of the restart ends the actor; if that is gone, it ends itself.
_GRACE_S = 20.0


class Holder:
    """Facade of kvstore.node.handover.holder.Holder.

    Args:
        name: of the store.
        node_id: of the node that it runs on.
        wait_s: how long it waits for the memory.
        keep_s: how long it holds the memory, from then on, if no store takes it.
    """

    def __init__(self, name: str, node_id: str, wait_s: float, keep_s: float) -> None:
        # The path is of this process's environment, as that of the stores here.
        self._path = handover_path(name, node_id)
        self._holder, self._wait_s, self._keep_s = HolderLoop(self._path), wait_s, keep_s
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="raykv-holder", daemon=True).start()

    def _run(self) -> None:
        try:
            self._holder.run(self._keep_s, self._wait_s)
            self._is_over.set()
            time.sleep(_GRACE_S)
        finally:
            os._exit(0)

    def path(self) -> str:
        """Return where it listens; "" if the store gave its memory already, to the holder of another restart."""
        return "" if self._holder.is_given else self._path

    def tell_why(self, why: str) -> None:
        """Tell the next store, which gets nothing, why."""
        self._holder.why_nothing = why

    def kept_s(self) -> float:
        """Return how long it still keeps the memory; 0.0 if it has none, or none any more."""
        return self._holder.kept_s()

    def keep_longer(self) -> float:
        """Let the time for which it keeps the memory begin anew; return it, 0.0 if it has none, or none any more."""
        return self._holder.keep_longer(self._keep_s)

    def end(self) -> None:
        """Let go of the memory, if it is still held, and remove the file of the socket; the caller ends the actor."""
        self._holder.close()
        self._is_over.wait(_GRACE_S)
