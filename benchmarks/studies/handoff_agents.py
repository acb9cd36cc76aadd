"""Where the agent of a GPU's staging memory should live: in the worker, or in a process of its own (docs/adr/0008).

    python -m benchmarks.studies.handoff_agents [--json]

Needs two GPUs; `--dry` runs the same steps on host memory, to see that they run. Every side is a process of its own,
told what to do over a pipe:

    worker   torch is loaded, staging comes from torch, the agent lives beside it
    isolated the same, and each process sees its own GPU only, as Ray's workers do
    mover    no torch: the process allocates the staging, and a worker maps it
    mapped   the agent registers memory that it has mapped from its owner
    one      one process with an agent for each of two GPUs
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from typing import Any

import click
import msgspec
import numpy as np

MIB = 1 << 20
FRAGMENT_BYTES, BLOCK_BYTES = 32 << 10, 2 * MIB
TOTAL_BYTES, STAGING_BYTES = 512 * MIB, 1024 * MIB
STEP_S = 40.0


class Side:
    """One process's end; runs in the child."""

    def __init__(self) -> None:
        self.transports: dict[str, Any] = {}
        self.slabs: dict[str, Any] = {}
        self.peers: list[str] = []

    def start(self, key: str, kind: str, gpu: int, num_bytes: int, handle: bytes = b"") -> dict[str, Any]:
        """Get memory, register it, and say how long each step took."""
        began_s, steps = time.monotonic(), {}

        def step(name: str) -> None:
            nonlocal began_s
            steps[name], began_s = round(time.monotonic() - began_s, 3), time.monotonic()

        if kind == "worker":
            import torch

            step("torch_s")
            self.slabs[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}")
            torch.cuda.synchronize()
            address, out = self.slabs[key].data_ptr(), b""
        elif kind == "host":
            self.slabs[key] = np.zeros(num_bytes, np.uint8)
            address, out = self.slabs[key].ctypes.data, b""
        else:
            from kvstore.kernels.vram import DeviceSlab, MappedSlab

            step("import_s")
            slab = MappedSlab(gpu, handle) if kind == "mapped" else DeviceSlab(gpu, num_bytes)
            self.slabs[key] = slab
            address, out = slab.address, getattr(slab, "handle", b"")
        step("memory_s")
        from kvstore.mover.nixl import NixlTransport

        place = None if kind == "host" else gpu
        transport = NixlTransport(f"{key}-{os.getpid()}-{time.monotonic_ns()}", address, num_bytes, gpu=place)
        transport.set_slots(FRAGMENT_BYTES, TOTAL_BYTES // FRAGMENT_BYTES)
        step("agent_s")
        self.transports[key] = transport
        return {
            "steps": steps, "agent": transport.describe(), "address": address, "gpu": gpu, "handle": out,
            "pid": os.getpid(),
        }  # fmt: skip

    def connect(self, key: str, agent: bytes, address: int, gpu: int) -> None:
        """Load a peer's metadata."""
        from kvstore.mover.transport import PeerDescription

        description = PeerDescription(
            agent=agent, address=address, slot_bytes=FRAGMENT_BYTES, num_slots=TOTAL_BYTES // FRAGMENT_BYTES, gpu=gpu
        )
        self.transports[key].add_peer("peer", description)

    def read(self, key: str, piece_bytes: int, chunk_bytes: int, window: int, mixed: bool, rounds: int) -> list[float]:
        """READ 512 MiB in pieces, `chunk_bytes` a request, up to `window` requests at once; GB/s of every round."""
        from kvstore.mover.transport import ReadRequest, ReadState

        transport, count = self.transports[key], TOTAL_BYTES // piece_bytes
        # A transport knows slots of one size only; here the same memory is cut in several ways.
        transport.set_slots(piece_bytes, count)
        name, description, lists = transport.peers["peer"]
        transport.peers["peer"] = (
            name,
            msgspec.structs.replace(description, slot_bytes=piece_bytes, num_slots=count),
            lists,
        )
        order = np.arange(count, dtype=np.int32)
        remote = np.random.default_rng(0).permutation(order) if mixed else order
        per_chunk = max(1, chunk_bytes // piece_bytes)
        rates = []
        for _ in range(rounds):
            began_s, running = time.perf_counter(), []
            for first in range(0, len(order), per_chunk):
                part = slice(first, first + per_chunk)
                request = ReadRequest(
                    peer="peer", block_bytes=piece_bytes, local_slots=order[part], remote_slots=remote[part]
                )
                running.append(transport.post(request))
                while len(running) >= window:
                    if transport.poll(running[0]) is not ReadState.RUNNING:
                        transport.release(running.pop(0))
            while running:
                if transport.poll(running[0]) is not ReadState.RUNNING:
                    transport.release(running.pop(0))
            rates.append(TOTAL_BYTES / (time.perf_counter() - began_s) / 1e9)
        return rates

    def read_until(self, key: str, seconds: float) -> str:
        """READ over and over; returns how that ended."""
        until_s = time.monotonic() + seconds
        rounds = 0
        while time.monotonic() < until_s:
            try:
                self.read(key, BLOCK_BYTES, 64 * MIB, 3, False, 1)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result.
                return f"after {rounds} rounds {type(error).__name__}: {str(error)[:120]}"
            rounds += 1
        return f"{rounds} rounds"

    def fill(self, key: str, value: int) -> None:
        """Write a byte everywhere, in a process that has torch."""
        self.slabs[key].fill_(value)
        _sync(self.slabs[key])

    def map(self, key: str, gpu: int, handle: bytes, num_bytes: int) -> None:
        """Map another process's slab as a torch tensor."""
        import torch

        from kvstore.kernels.vram import MappedSlab

        slab = MappedSlab(gpu, handle)
        view = {"shape": (num_bytes,), "typestr": "|u1", "data": (slab.address, False), "version": 3}
        holder = type("View", (), {"__cuda_array_interface__": view, "slab": slab})()
        self.slabs[key] = torch.as_tensor(holder, device=f"cuda:{gpu}")

    def look(self, key: str) -> list[int]:
        """Return the lowest and the highest byte that is in the part that is read."""
        slab = self.slabs[key][:TOTAL_BYTES]
        return [int(slab.min()), int(slab.max())]

    def copy_rate(self, key: str, gpu: int) -> float:
        """GB/s of a copy of 512 MiB from this process's own memory into a slab, on one GPU or between two."""
        import torch

        source = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
        target = self.slabs[key][:TOTAL_BYTES]
        rates = []
        for _ in range(8):
            _sync(source), _sync(target)
            began_s = time.perf_counter()
            target.copy_(source)
            _sync(source), _sync(target)
            rates.append(TOTAL_BYTES / (time.perf_counter() - began_s) / 1e9)
        return statistics.median(rates[2:])

    def survives(self, key: str) -> str:
        """Touch a mapping whose owner may be gone, then memory of one's own."""
        import torch

        try:
            self.slabs[key][:MIB].fill_(7)
            _sync(self.slabs[key])
            mapped = f"mapping works ({int(self.slabs[key][0])})"
        except Exception as error:  # noqa: BLE001
            mapped = f"mapping fails: {type(error).__name__}: {str(error)[:80]}"
        try:
            own = torch.ones(10, device=self.slabs[key].device).sum().item()
            return f"{mapped}; own memory works ({own})"
        except Exception as error:  # noqa: BLE001
            return f"{mapped}; own memory fails: {type(error).__name__}: {str(error)[:80]}"

    def close(self) -> None:
        """Close every agent."""
        for transport in self.transports.values():
            transport.close()


def _sync(tensor: Any) -> None:
    import torch

    torch.cuda.synchronize(tensor.device)


def _used_mib(gpu: int) -> int:
    """Return what is in use on a GPU, MiB; -1 where nobody says."""
    command = ["nvidia-smi", "-i", str(gpu), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return -1


def _serve(pipe: Any, env: dict[str, str], log: str) -> None:
    os.environ.update(env)
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    side = Side()
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(side, verb)(**arguments)))
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {str(error)[:200]}"))


class Process:
    """A side, from the parent."""

    def __init__(self, env: dict[str, str] | None = None, log: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, env or {}, log), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, verb: str, timeout_s: float = STEP_S, **arguments: Any) -> Any:
        self.send(verb, **arguments)
        return self.answer(timeout_s)

    def send(self, verb: str, **arguments: Any) -> None:
        self.pipe.send((verb, arguments))

    def answer(self, timeout_s: float = STEP_S) -> Any:
        if not self.pipe.poll(timeout_s):
            raise RuntimeError(f"no answer in {timeout_s} s")
        try:
            fine, value = self.pipe.recv()
        except EOFError:
            self.process.join(3)
            raise RuntimeError(f"the process ended with {self.process.exitcode}") from None
        if not fine:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGCONT)
        self.process.kill()
        self.process.join(5)


def _link(reader: Process, started: dict[str, Any], key: str = "a") -> None:
    reader.ask("connect", key=key, agent=started["agent"], address=started["address"], gpu=started["gpu"])


def _rates(reader: Process, rows: list[dict[str, Any]], where: str, short: bool, rounds: int) -> None:
    """Measure READs by one side of what it is connected to."""

    def row(way: str, rates: list[float], chunk_mib: int, window: int) -> None:
        rows.append({
            "where": where, "way": way, "chunk_mib": chunk_mib, "window": window, "first_gb_per_s": round(rates[0], 2),
            "gb_per_s": round(statistics.median(rates[1:] or rates), 2),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)

    def read(way: str, piece: int, chunk: int, window: int, mixed: bool, count: int = rounds) -> None:
        row(way, reader.ask("read", key="a", piece_bytes=piece, chunk_bytes=chunk, window=window, mixed=mixed,
                            rounds=count), chunk // MIB, window)  # fmt: skip

    read("packed", BLOCK_BYTES, 64 * MIB, 3, False)
    if short:
        return
    for chunk, window in ((16, 3), (32, 3), (128, 3), (512, 1), (64, 2), (16, 8)):
        read("packed", BLOCK_BYTES, chunk * MIB, window, False)
    read("blocks", BLOCK_BYTES, 64 * MIB, 3, True)
    read("fragments", FRAGMENT_BYTES, 512 * MIB, 1, True, 3)


def _pair(
    rows: list[dict[str, Any]], where: str, kinds: str, rounds: int, *, dry: bool, short: bool = False,
    envs: tuple[dict[str, str], dict[str, str]] = ({}, {}), gpus: tuple[int, int] = (0, 1), log: str = "",
) -> None:  # fmt: skip
    sides = [Process(env, log) for env in envs]
    try:
        began = []
        for index, (side, gpu) in enumerate(zip(sides, gpus, strict=True)):
            before_mib = _used_mib(index)
            began.append(side.ask("start", key="a", kind="host" if dry else kinds, gpu=gpu, num_bytes=STAGING_BYTES))
            context_mib = _used_mib(index) - before_mib - STAGING_BYTES // MIB
            rows.append({"where": where, "way": "start", **began[-1]["steps"], "context_mib": context_mib})
            print(rows[-1], file=sys.stderr, flush=True)
        _link(sides[1], began[0])
        if kinds == "worker" and not dry:
            sides[0].ask("fill", key="a", value=42)
        _rates(sides[1], rows, where, short, rounds)
        if kinds == "worker" and not dry:
            rows.append({"where": where, "way": "bytes", "low_high": sides[1].ask("look", key="a")})
    finally:
        for side in sides:
            side.end()


def _mapping(rows: list[dict[str, Any]]) -> None:
    """A mover owns the staging and a worker maps it; then the mover is killed."""
    mover, worker = Process(), Process()
    try:
        worker.ask("start", key="own", kind="worker", gpu=0, num_bytes=MIB)
        began = mover.ask("start", key="a", kind="mover", gpu=0, num_bytes=STAGING_BYTES)
        worker.ask("map", key="m", gpu=0, handle=began["handle"], num_bytes=STAGING_BYTES)
        rows.append(
            {"where": "mover", "way": "copy into the mapping", "gb_per_s": worker.ask("copy_rate", key="m", gpu=0)}
        )
        worker.ask("map", key="far", gpu=1, handle=began["handle"], num_bytes=STAGING_BYTES)
        rows.append({"where": "mover", "way": "copy into the mapping from the other GPU",
                     "gb_per_s": worker.ask("copy_rate", key="far", gpu=1)})  # fmt: skip
    except RuntimeError as error:
        rows.append({"where": "mover", "way": "mapping", "error": str(error)})
    try:
        mover.end()
        rows.append({"where": "mover", "way": "the mover is killed", "what": worker.ask("survives", key="m")})
    except RuntimeError as error:
        rows.append({"where": "mover", "way": "the mover is killed", "error": str(error)})
    finally:
        worker.end()


def _reexport(rows: list[dict[str, Any]], rounds: int) -> None:
    """The agent registers what its process has only mapped."""
    owner, agent, reader = Process(), Process(), Process()
    try:
        slab = owner.ask("start", key="a", kind="mover", gpu=0, num_bytes=STAGING_BYTES)
        began = agent.ask("start", key="a", kind="mapped", gpu=0, num_bytes=STAGING_BYTES, handle=slab["handle"])
        reader.ask("start", key="a", kind="mover", gpu=1, num_bytes=STAGING_BYTES)
        _link(reader, began)
        _rates(reader, rows, "mapped", True, 2)
    except RuntimeError as error:
        rows.append({"where": "mapped", "way": "packed", "error": str(error)})
    finally:
        for side in (owner, agent, reader):
            side.end()


def _one_process(rows: list[dict[str, Any]], rounds: int, dry: bool) -> None:
    """One process reads from itself, between two GPUs."""
    side = Process()
    try:
        kind = "host" if dry else "mover"
        began = [
            side.ask("start", key=key, kind=kind, gpu=gpu, num_bytes=STAGING_BYTES) for key, gpu in (("b", 0), ("a", 1))
        ]
        rows.append({"where": "one", "way": "start", **began[1]["steps"]})
        _link(side, began[0])
        _rates(side, rows, "one", True, rounds)
    except RuntimeError as error:
        rows.append({"where": "one", "way": "packed", "error": str(error)})
    finally:
        side.end()


def _faults(rows: list[dict[str, Any]], dry: bool) -> None:
    """Kill or stop one side in the middle of READs that follow each other, and see what becomes of the other."""
    kind = "host" if dry else "mover"
    for victim, number in (("source", signal.SIGKILL), ("reader", signal.SIGKILL), ("source", signal.SIGSTOP)):
        source, reader = Process(), Process()
        way = f"{victim} gets {number.name}"
        try:
            began = source.ask("start", key="a", kind=kind, gpu=0, num_bytes=STAGING_BYTES)
            reader.ask("start", key="a", kind=kind, gpu=0 if dry else 1, num_bytes=STAGING_BYTES)
            _link(reader, began)
            _rates(reader, [], "warm", True, 2)
            reader.send("read_until", key="a", seconds=4.0)
            time.sleep(0.7)
            os.kill((source if victim == "source" else reader).process.pid or 0, number)
            if victim == "reader":
                reader.process.join(5)
                time.sleep(3)
                source.ask("start", key="x", kind=kind, gpu=0, num_bytes=MIB)
                rows.append({"where": "faults", "way": way, "what": "the source goes on"})
            else:
                what = "?"
                try:
                    what = reader.answer(8.0)
                except RuntimeError as error:
                    what = str(error)
                rows.append({"where": "faults", "way": way, "what": f"the reader: {what}"})
                if number is signal.SIGSTOP:
                    os.kill(source.process.pid or 0, signal.SIGCONT)
                    time.sleep(2)
                    alive = [p.process.is_alive() for p in (source, reader)]
                    rows.append({"where": "faults", "way": way, "what": f"after SIGCONT alive: {alive}"})
        except Exception as error:  # noqa: BLE001
            rows.append(
                {
                    "where": "faults",
                    "way": way,
                    "error": f"{error}; exit {source.process.exitcode} {reader.process.exitcode}",
                }
            )
        finally:
            print(rows[-1], file=sys.stderr, flush=True)
            source.end()
            reader.end()


def _peer_copy(rows: list[dict[str, Any]]) -> None:
    """The limit: one process, two GPUs, one copy."""
    side = Process()
    try:
        side.ask("start", key="a", kind="worker", gpu=1, num_bytes=STAGING_BYTES)
        rows.append({"where": "limit", "way": "peer copy", "gb_per_s": side.ask("copy_rate", key="a", gpu=0)})
        print(rows[-1], file=sys.stderr, flush=True)
    finally:
        side.end()


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--dry", is_flag=True, help="On host memory.")
@click.option("--log", default="", help="Where the sides write what UCX says about its lanes.")
@click.option("--only", default="", help="Steps, separated by commas.")
def main(rounds: int, dry: bool, log: str, only: str) -> None:
    from kvstore.tools.documents import as_document
    from kvstore.tools.provenance import provenance

    rows: list[dict[str, Any]] = []
    lanes = ({"UCX_PROTO_INFO": "used", "UCX_LOG_LEVEL": "info"},) * 2
    isolated = ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    steps = {
        "limit": lambda: None if dry else _peer_copy(rows),
        "mover": lambda: _pair(rows, "mover", "mover", rounds, dry=dry),
        "worker": lambda: _pair(rows, "worker", "worker", rounds, dry=dry),
        "isolated": lambda: _pair(rows, "isolated", "worker", 3, dry=dry, short=True, envs=isolated, gpus=(0, 0)),
        "lanes": lambda: _pair(rows, "lanes", "mover", 3, dry=dry, short=True, envs=lanes, log=log),
        "mapping": lambda: None if dry else _mapping(rows),
        "one": lambda: _one_process(rows, 3, dry),
        "mapped": lambda: None if dry else _reexport(rows, 2),
        "faults": lambda: _faults(rows, dry),
    }
    for name, run in steps.items():
        if only and name not in only.split(","):
            continue
        began_s = time.monotonic()
        try:
            run()
        except Exception as error:  # noqa: BLE001
            rows.append({"where": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            print(rows[-1], file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    print(as_document({**provenance(), "rows": rows}), end="")


if __name__ == "__main__":
    main()
