"""A store that does not answer, in this process."""

import contextlib
import threading

from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import KVStoreError
from kvstore.rpc.connect import connect_local


@contextlib.contextmanager
def standing_still(core):
    """The control thread of a store does nothing, as that of a process that is stopped."""
    stands, goes_on = threading.Event(), threading.Event()
    hello = core.control.hello

    def stand(*args):
        core.control.hello = hello
        stands.set()
        goes_on.wait(30)
        return hello(*args)

    def knock():
        with contextlib.suppress(KVStoreError):
            connection, fd = connect_local(
                core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=30.0
            )
            fd.close()
            connection.close()

    core.control.hello = stand
    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    assert stands.wait(5)
    try:
        yield
    finally:
        goes_on.set()
        knocking.join(5)
