"""Machines on a switch, made of network namespaces: each has an address, a wire and processes of its own.

A machine has namespaces of its own for network, processes and shared memory, so its processes see no others, and all
of them end when its first one is killed. Files are shared. No packet leaves: the switch has no way out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import eventually

ROUTER = "192.0.2.1"
PREFIX = "raykv"
SHM_BYTES = 16 << 30  # a bound; Ray takes less, and uses next to nothing of it
_TOOL_S = 20.0
_NUMBERS = itertools.count()
#: The first process of a machine: takes in what loses its parent, and waits.
_INIT = (
    "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint(flush=True)\nwhile True:\n    signal.pause()\n"
)


def why_not() -> str:
    """Say what this machine lacks for machines of this kind; nothing if it has all."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc", "nsenter", "setpriv", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    name = f"{PREFIX}-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=_TOOL_S, check=False)
    if made.returncode != 0:
        return f"needs network namespaces: {made.stderr.strip()}"
    tool("ip", "netns", "del", name)
    return ""


def tool(*words: str, lines: list[str] | None = None) -> str:
    """Run one of the tools, with lines on its standard input, and return its output."""
    said = subprocess.run(
        words, input="\n".join(lines or []), capture_output=True, text=True, timeout=_TOOL_S, check=False
    )
    assert said.returncode == 0, f"{words}: {said.stderr}"
    return said.stdout


@dataclass
class Machine:
    """One machine; its wire ends at the switch's port of the same number."""

    namespace: str
    address: str
    port: str
    first: subprocess.Popen[bytes]
    first_pid: int

    def command(self, *words: str) -> list[str]:
        """Return a command that runs these words on this machine, with the caller's environment and streams."""
        return ["nsenter", "--net", "--pid", "--mount", "--ipc", "-t", str(self.first_pid), *words]

    def pids(self) -> list[int]:
        """Its processes without the first one, by their ids outside."""
        own, found = os.readlink(f"/proc/{self.first_pid}/ns/pid"), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "pid") == own and int(process.name) != self.first_pid:
                    found.append(int(process.name))
        return found

    def freeze(self) -> None:
        """Stop all its processes, also those that begin meanwhile."""
        eventually(lambda: not [pid for pid in self.pids() if _is_running(pid) and _signal(pid, signal.SIGSTOP)])

    def thaw(self) -> None:
        for pid in self.pids():
            _signal(pid, signal.SIGCONT)

    def end(self) -> None:
        """End all its processes."""
        _signal(self.first_pid, signal.SIGKILL)
        self.first.kill()
        self.first.wait(_TOOL_S)
        if self.first.stdout is not None:
            self.first.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TtZX"
    except OSError:
        return False


def _signal(pid: int, number: int) -> bool:
    """Send a signal; return whether the process was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@dataclass
class Lab:
    """A switch and its machines. `close` ends the processes, the machines and the switch, whatever happened before."""

    name: str = field(default_factory=lambda: f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}")
    machines: list[Machine] = field(default_factory=list)
    _namespaces: list[str] = field(default_factory=list)
    _others: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def open(self) -> None:
        """Make the switch."""
        _sweep()
        self._add_namespace(self.switch)
        lines = ["link add br0 type bridge", f"addr add {ROUTER}/24 dev br0", "link set br0 up", "link set lo up"]
        tool("ip", "-n", self.switch, "-batch", "-", lines=lines)

    def add(self, address: str, relay: bool = False) -> Machine:
        """Add a machine, on a wire of the kernel, or of a relay that can lose and delay packets."""
        number = len(self.machines)
        namespace, port = f"{self.name}-{number}", f"port{number}"
        self._add_namespace(namespace)
        if relay:
            self._begin_relay(namespace, port)
        else:
            tool("ip", "link", "add", "eth0", "netns", namespace, "type", "veth", "peer", port, "netns", self.switch)
        tool("ip", "-n", self.switch, "-batch", "-", lines=[f"link set {port} master br0", f"link set {port} up"])
        # Ray takes the address of the interface that leads to the outside.
        lines = [
            f"addr add {address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
            f"route add default via {ROUTER}",
        ]
        tool("ip", "-n", namespace, "-batch", "-", lines=lines)
        first = subprocess.Popen(
            [
                "setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace,
                "unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc",
                "sh", "-c", f'mount -t tmpfs -o size={SHM_BYTES} shm /dev/shm && exec "$@"', "sh",
                sys.executable, "-S", "-c", _INIT,
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._others.append(first)
        assert first.stdout is not None
        assert first.stdout.readline() == b"\n", "the machine's first process did not start"
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        machine = Machine(namespace, address, port, first, int(children[0]))
        self.machines.append(machine)
        return machine

    def cut(self, machine: Machine) -> None:
        """Pull the wire of a machine."""
        tool("ip", "-n", self.switch, "link", "set", machine.port, "down")

    def mend(self, machine: Machine) -> None:
        tool("ip", "-n", self.switch, "link", "set", machine.port, "up")

    def slow_down(self, machine: Machine, megabits_per_s: int) -> None:
        """Limit what reaches a machine."""
        rate = ["rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "100ms"]
        tool("tc", "-n", self.switch, "qdisc", "replace", "dev", machine.port, "root", "tbf", *rate)

    def speed_up(self, machine: Machine) -> None:
        tool("tc", "-n", self.switch, "qdisc", "del", "dev", machine.port, "root")

    def num_bytes_to(self, machine: Machine) -> int:
        """Return how many bytes the switch has sent to a machine."""
        (link,) = json.loads(tool("ip", "-n", self.switch, "-j", "-s", "link", "show", machine.port))
        return int(link["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for machine in self.machines:
            machine.end()
        for other in self._others:
            other.kill()
            other.wait(_TOOL_S)
            for stream in (other.stdin, other.stdout):
                if stream is not None:
                    stream.close()
        for namespace in reversed(self._namespaces):
            tool("ip", "netns", "del", namespace)
        self.machines, self._others, self._namespaces = [], [], []

    def _add_namespace(self, name: str) -> None:
        tool("ip", "netns", "add", name)
        self._namespaces.append(name)

    def _begin_relay(self, namespace: str, port: str) -> None:
        tool("ip", "-n", namespace, "tuntap", "add", "eth0", "mode", "tap")
        tool("ip", "-n", self.switch, "tuntap", "add", port, "mode", "tap")
        script = str(Path(__file__).with_name("relay.py"))
        words = ["setpriv", "--pdeathsig", "KILL", sys.executable, script, namespace, "eth0", self.switch, port]
        relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._others.append(relay)
        self._say(relay, "0 0")

    def delay(self, delay_s: float, loss: float) -> None:
        """Have each relay keep every packet for a time, in both directions, and lose a share of them."""
        for relay in self._others:
            if relay.stdin is not None:
                self._say(relay, f"{delay_s} {loss}")

    @staticmethod
    def _say(relay: subprocess.Popen[str], words: str) -> None:
        assert relay.stdin is not None
        assert relay.stdout is not None
        relay.stdin.write(f"{words}\n")
        relay.stdin.flush()
        assert relay.stdout.readline() == "ok\n", "the relay ended"


def _sweep() -> None:
    """Remove namespaces of test processes that were killed; their processes ended with them."""
    for line in tool("ip", "netns", "list").splitlines():
        name = line.split()[0]
        parts = name.split("-")
        if parts[0] == PREFIX and parts[1].isdigit() and not Path(f"/proc/{parts[1]}").exists():
            tool("ip", "netns", "del", name)
