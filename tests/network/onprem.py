"""The cluster of cluster.yaml on machines of a lab: its own start commands, without containers and ssh."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from machines import Lab, Machine
from ray.autoscaler._private.util import prepare_config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
START_S = 90.0
NUM_TRIES = 3
COMMAND_S = 90.0
MOST_CHARS = 3000  # of a log, in a failure


class Engine:
    """A process of engine_process.py on a machine."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log, self.node_id = process, log, ""

    def wait(self) -> None:
        """Wait until it is attached to its machine's store."""
        self.node_id = self._answer("its start", START_S)

    def begin(self, do: str, **more: Any) -> None:
        """Ask something, whose answer `answer` waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 70.0) -> Any:
        return self._answer("the last question", timeout_s)

    def ask(self, do: str, wait_s: float = 70.0, **more: Any) -> Any:
        self.begin(do, **more)
        return self._answer(do, wait_s)

    def load(self, seed: int, num_blocks: int, timeout_s: float | None = None) -> dict[str, Any]:
        """Load, and see that no usable byte is wrong."""
        return self.checked(self.ask("load", seed=seed, num_blocks=num_blocks, timeout_s=timeout_s))

    @staticmethod
    def checked(said: dict[str, Any]) -> dict[str, Any]:
        assert said["num_wrong"] == 0, said
        return said

    def _answer(self, what: str, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"no answer to {what} in {timeout_s} s"
        said = json.loads(self._process.stdout.readline() or '{"error": "the engine\'s process ended"}')
        assert "is" in said, (said, self._log.read_text(errors="replace")[-MOST_CHARS:])
        return said["is"]

    def end(self) -> None:
        """End what waits here for the process on the machine, which ended with the machine."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(20)


class Cluster:
    """Machines of a lab with the Ray that cluster.yaml starts there; tokens are on.

    Args:
        folder: for the files of all machines. Short, because Ray's sockets lie deep below.
        num_machines: the head, and the workers.
        relays: whether the wires can delay and lose packets.
    """

    def __init__(self, folder: Path, num_machines: int, relays: bool = False) -> None:
        self.lab, self._folder, self._engines = Lab(), folder, list[Engine]()
        self._token = secrets.token_hex(32)
        provider = CONFIG["provider"]
        # Four machines are more than the file has.
        addresses = [provider["head_ip"], *provider["worker_ips"], "192.0.2.13"][:num_machines]
        try:
            self.lab.open()
            for address in addresses:
                self._prepare(self.lab.add(address, relays))
            self.head, *self.workers = self.lab.machines
            # The head first; then the others at once.
            self.start_ray(self.head)
            self.start_ray(*self.workers)
        except BaseException:
            self.close()
            raise

    def start_ray(self, *machines: Machine) -> None:
        """Run the start commands of cluster.yaml on machines, at the same time."""
        # Ray gives itself 30 s to start, which is too little on a machine that is busy with other tests.
        for _ in range(NUM_TRIES):
            started = {machine.address: self._begin_ray(machine) for machine in machines}
            said = {address: process.communicate(timeout=START_S) for address, process in started.items()}
            machines = tuple(machine for machine in machines if started[machine.address].returncode != 0)
            if not machines:
                return
        raise AssertionError(f"Ray did not start on {[machine.address for machine in machines]}: {said}")

    def begin(self, machine: Machine, *words: str, **env: str) -> subprocess.Popen[str]:
        """Begin a command on a machine; `env` adds to its environment."""
        return subprocess.Popen(
            machine.command(*words),
            env={**self._environment(machine), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, machine: Machine, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        process = self.begin(machine, *words, **env)
        try:
            out, err = process.communicate(timeout=COMMAND_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def kvstore(self, machine: Machine, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(machine, "kvstore", *words, **env)

    def status(self, machine: Machine) -> dict[str, Any]:
        """Return what `kvstore status --json` says on a machine."""
        said = self.kvstore(machine, "status", "--json")
        assert said.returncode in (0, 1), said.stderr
        return dict(json.loads(said.stdout))

    @staticmethod
    def runs(machine: Machine, name: str) -> bool:
        """Return whether a program runs on a machine whose name begins like this."""
        for pid in machine.pids():
            with contextlib.suppress(OSError):
                program = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]
                if os.path.basename(program).startswith(name):
                    return True
        return False

    def open_engine(self, machine: Machine, num_blocks: int = 256) -> Engine:
        return self.open_engines([machine], num_blocks)[0]

    def open_engines(self, machines: list[Machine], num_blocks: int = 256) -> list[Engine]:
        """Open an engine on each machine, all at the same time."""
        script = str(Path(__file__).with_name("engine_process.py"))
        opened = []
        for machine in machines:
            path = self._home(machine) / f"engine{len(self._engines)}.log"
            with open(path, "wb") as log:
                process = subprocess.Popen(
                    machine.command(sys.executable, script, str(num_blocks)),
                    env=self._environment(machine),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            opened.append(Engine(process, path))
            self._engines.append(opened[-1])
        for engine in opened:
            engine.wait()
        return opened

    def close(self) -> None:
        self.lab.close()
        for engine in self._engines:
            engine.end()
        self._engines.clear()

    def _begin_ray(self, machine: Machine) -> subprocess.Popen[str]:
        kind = "head" if machine.address == CONFIG["provider"]["head_ip"] else "worker"
        commands = CONFIG[f"{kind}_start_ray_commands"]
        return self.begin(machine, "bash", "-c", "\n".join(["set -e", *commands]))

    def _home(self, machine: Machine) -> Path:
        return self._folder / machine.address.rpartition(".")[2]

    def _prepare(self, machine: Machine) -> None:
        """Give a machine its folders, the token, and on the head the file that `ray up` writes there."""
        home = self._home(machine)
        (home / ".ray").mkdir(mode=0o700, parents=True)
        token = home / ".ray" / "auth_token"
        token.touch(mode=0o600)
        token.write_text(self._token)
        # As `ray up` completes it, but for workers that the head would start over ssh.
        config = copy.deepcopy(CONFIG) | {"min_workers": 0, "max_workers": 0, "docker": {}, "file_mounts": {}}
        config["provider"]["worker_ips"] = []
        completed = prepare_config(config) | {"cluster_synced_files": []}
        (home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(completed), encoding="utf-8")

    def _environment(self, machine: Machine) -> dict[str, str]:
        home = str(self._home(machine))
        paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **os.environ,
            "PATH": ":".join(paths),
            "PYTHONPATH": str(ROOT),
            "HOME": home,
            "TMPDIR": home,
            "RAY_TMPDIR": home,
            "RAY_AUTH_MODE": "token",
            "RAY_HEAD_IP": CONFIG["provider"]["head_ip"],
        }
