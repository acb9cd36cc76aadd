"""Which memory is registered when, with a driver that only keeps a list; the real one: test_gpu.py of the kernels."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from kvstore.errors import RegistrationFailed
from kvstore.memory.pinning import ArenaPinning

BASE = 1 << 40


class Driver:
    """Keeps a list of what is registered, and refuses what the real driver refuses."""

    def __init__(self, refuse=()):
        self.live, self.order, self.refuse = {}, [], set(refuse)
        self.gate = threading.Semaphore(0)
        self.held = False

    def register(self, address, num_bytes):
        if self.held:
            assert self.gate.acquire(timeout=10)
        if address in self.refuse:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
        for start, size in self.live.items():
            assert address + num_bytes <= start or start + size <= address, "registered twice"
        self.live[address] = num_bytes
        self.order.append(address)

    def unregister(self, address):
        if address not in self.live:
            raise RuntimeError("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
        del self.live[address]


def pinning(driver, slot_bytes=1 << 20, num_slots=40, piece_bytes=4 << 20):
    return ArenaPinning(BASE, slot_bytes, num_slots, driver.register, driver.unregister, piece_bytes)


@pytest.mark.parametrize("slot_bytes", [64, 4096, 4160, 65536, 100_032, 3 << 20])
@pytest.mark.parametrize("num_slots", [2, 63, 64, 65, 1000])
def test_pieces_are_whole_slots_and_cover_every_slot_once(slot_bytes, num_slots):
    driver = Driver()
    pinned = pinning(driver, slot_bytes, num_slots)
    pinned.wait(np.arange(num_slots), 10)
    ends = [0, *(start + size - BASE for start, size in sorted(driver.live.items()))]
    assert [start - BASE for start in sorted(driver.live)] == ends[:-1]
    assert num_slots * slot_bytes <= ends[-1] < num_slots * slot_bytes + mmap.PAGESIZE
    assert all((start - BASE) % slot_bytes == 0 for start in driver.live)
    assert pinned.num_registered_bytes == ends[-1]
    assert pinned.close()
    assert driver.live == {}


def test_what_is_waited_for_comes_before_the_rest():
    driver = Driver()
    driver.held = True
    pinned = pinning(driver)
    waiter = threading.Thread(target=pinned.wait, args=(np.array([33, 34]), 10))
    waiter.start()
    while not pinned.wanted:
        threading.Event().wait(0.001)
    for _ in range(3):
        driver.gate.release()
    waiter.join(10)
    assert not waiter.is_alive()
    # The first is always registered first, and the thread may have begun with another when the wait came.
    assert BASE + 32 * (1 << 20) in driver.order[:3]
    assert driver.order[0] == BASE
    for _ in range(10):
        driver.gate.release()
    assert pinned.close()


def test_a_wait_has_an_end_and_registering_goes_on():
    driver = Driver()
    driver.held = True
    pinned = pinning(driver)
    with pytest.raises(RegistrationFailed, match=r"within 0.05 s"):
        pinned.wait(np.array([3]), 0.05)
    for _ in range(10):
        driver.gate.release()
    pinned.wait(np.arange(40), 10)
    assert pinned.close()


def test_a_refused_piece_fails_its_slots_only():
    driver = Driver(refuse=[BASE + (8 << 20)])
    pinned = pinning(driver)
    pinned.wait(np.array([0, 7, 12, 39]), 10)
    with pytest.raises(RegistrationFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        pinned.wait(np.array([0, 9]), 10)
    assert pinned.close()
    assert driver.live == {}


def test_what_nobody_expected_of_a_driver_fails_that_piece_and_no_other():
    driver, register = Driver(), Driver.register

    def fail(address, num_bytes):
        if address == BASE + (8 << 20):
            raise OSError("nobody expected that")
        register(driver, address, num_bytes)

    driver.register = fail
    pinned = pinning(driver)
    pinned.wait(np.array([0, 7, 12, 39]), 10)
    with pytest.raises(RegistrationFailed, match="nobody expected"):
        pinned.wait(np.array([9]), 10)
    assert pinned.close()


def test_close_ends_waits_and_registers_nothing_more():
    driver, failed = Driver(), []
    driver.held = True
    pinned = pinning(driver)

    def wait():
        try:
            pinned.wait(np.array([30]), 10)
        except RegistrationFailed as error:
            failed.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not pinned.wanted:
        threading.Event().wait(0.001)
    closing = threading.Thread(target=pinned.close)
    closing.start()
    waiter.join(10)
    assert "unmapped" in failed[0]
    driver.gate.release()  # the one that was under way
    closing.join(10)
    assert not closing.is_alive()
    assert (driver.live, len(driver.order)) == ({}, 1)
    assert pinned.close()


def test_a_driver_that_refuses_everything_does_not_stop_close():
    driver = Driver()
    pinned = pinning(driver)
    pinned.wait(np.arange(40), 10)
    driver.live.clear()
    assert pinned.close()
