"""A stage in a GPU's memory, for the mover that owns it. Loads neither torch nor CuPy."""

from __future__ import annotations

from kvstore.kernels.vram import CopyQueue, DeviceSlab, copy_to_host, gpu_uuids


class GpuStage:
    """Memory of the GPU with a `uuid` of 32 hex digits, registered with NIXL and mapped by workers.

    Its agents have the `name`.

    Raises:
        RuntimeError: there is no such GPU here, or it does not have that much memory; nothing is held.
        RegistrationFailed: NIXL could not register it; nothing is held.
    """

    def __init__(self, name: str, uuid: str, num_bytes: int) -> None:
        from kvstore.mover.nixl import NixlTransport

        found = gpu_uuids()
        if uuid not in found:
            raise RuntimeError(f"this process sees no such GPU, only {found}")
        self.gpu = found.index(uuid)
        self.slab = DeviceSlab(self.gpu, num_bytes)
        self.address, self.handle = self.slab.address, self.slab.handle
        try:
            copies = CopyQueue(self.gpu)
            self.begin_copies, self.copies_done = copies.copy, copies.reached
            self.transport = NixlTransport(name, self.address, num_bytes, gpu=self.gpu)
        except BaseException:
            self.slab.close()
            raise

    def copy_out(self, target: int, offset: int, num_bytes: int) -> None:
        """Copy bytes from `offset` of the stage to an address in host memory."""
        copy_to_host(self.gpu, target, self.address + offset, num_bytes)

    def close(self) -> None:
        """Close the transport, then free the memory."""
        self.transport.close()
        self.slab.close()
