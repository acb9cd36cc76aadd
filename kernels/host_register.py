"""Register host memory with the CUDA driver, so that a GPU copies from and to it at the link's speed."""

from __future__ import annotations

import ctypes

from kvstore.kernels.driver import check, libcuda, on_device

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every device of this process
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def check_same_addresses(device: int) -> None:
    """Refuse a device that uses other addresses for registered memory than the host.

    Raises:
        RuntimeError: the device does, or the driver does not answer.
    """
    handle, value = ctypes.c_int(), ctypes.c_int()
    with on_device(device):
        check(libcuda().cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)), "cuDeviceGet")
        check(
            libcuda().cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(_CAN_USE_HOST_POINTER), handle),
            "cuDeviceGetAttribute",
        )
    if not value.value:
        raise RuntimeError(
            f"wanted a device that reads registered host memory at the host's addresses, device {device} does not; "
            "copies of its caches are not supported"
        )


def register(address: int, num_bytes: int, device: int) -> None:
    """Pin a mapped range of memory.

    A copy must not cross from one range into the next: for the driver, neighbours are unrelated memory.

    Args:
        address: of the first byte, at the beginning of a page.
        num_bytes: whole pages, none of them registered yet.
        device: any CUDA device of this process.

    Raises:
        RuntimeError: the driver refused; nothing was registered.
    """
    with on_device(device):
        status = libcuda().cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
        )
        check(status, "cuMemHostRegister")


def unregister(address: int, device: int) -> None:
    """Undo `register` for the range that begins at an address; it must still be mapped.

    No copy may run there.

    Raises:
        RuntimeError: the driver refused.
    """
    with on_device(device):
        check(libcuda().cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")
