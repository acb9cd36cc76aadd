"""Options and errors of the command line: click's types, with texts for a person at a terminal."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.bounds import parse_bytes
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools.doctor import human_bytes
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance
from kvstore.tools.terminal import printable

_Function = TypeVar("_Function", bound=Callable[..., Any])
MAX_ERROR_CHARS = 600
#: Texts of errors for Python callers, and their replacements on the command line.
_OWN_WORDS = (
    (r"kvstore\.start\(name=('[^']*')\)", r"`kvstore start --name \1`"),
    (r"kvstore\.start\(\)", "`kvstore start`"),
    (r"\bconnect\(\) to it", "use it as it runs"),
    (r"\bwith Store\.restart\(\)", "with `kvstore restart --set`"),
    (r"\baddress='local'", "`kvstore start --local`"),
    (r"\b(address|name|capacity|lane)=(?=[ ,;.]|$)", r"--\1"),
    (r"\btimeout_s=(?=[ ,;.]|$)", "--timeout"),
    (r"\bblock_bytes=(?=[ ,;.]|$)", "--block-bytes"),
    (r"^(name|address): ", r"--\1: "),
    (r"^node_ids: ", "--node: "),
)
#: Of a text, or of what a node says in it.
_BEGINS = r"(?:^|(?<=: ))"
#: The same for settings that are options of `kvstore start`. Elsewhere `--set` alone gives them, by their names.
_OWN_SETTINGS = (
    (r"\bdisk_(path|capacity)=(?=[ ,;.]|$)", r"--disk-\1"),
    (_BEGINS + r"disk_write_bytes_per_day: ", "--disk-write-budget: "),
    (_BEGINS + r"disk_timeout_s: ", "--disk-timeout: "),
    (_BEGINS + r"disk_path: ", "--disk-path: "),
    (_BEGINS + r"events_endpoint: ", "--events-endpoint: "),
    (_BEGINS + r"events_replay_endpoint: ", "--events-replay-endpoint: "),
    (
        r"^disk_capacity_bytes: wanted disk_path and disk_capacity_bytes together",
        "wanted --disk-path and --disk-capacity",
    ),
    (_BEGINS + r"disk_capacity_bytes: ", "--disk-capacity: "),
    (_BEGINS + r"block_bytes: ", "--block-bytes: "),
    (_BEGINS + r"capacity_bytes: ", "--capacity: "),
)
#: The same for a benchmark that has a store's parts and other options.
_BENCH_DISK = (
    (r"\bcapacity=(?=[ ,;.]|$)|--capacity\b", "--size"),
    (r"\bdisk_path=(?=[ ,;.]|$)", "--path"),
    (_BEGINS + r"(?:disk_)?path: ", "--path: "),
    (_BEGINS + r"disk_capacity_bytes: ", "--size: "),
)
_BY_COMMAND = {"restart": (), "disk": _BENCH_DISK}
#: Numbers this large in errors about settings are sizes, but not behind a colon, where ports are.
_SIZE = re.compile(r"(?<!:)\b[0-9]{6,15}\b")
NAME = click.option("--name", default="default", show_default=True, help="Which store of the cluster.")
ADDRESS = click.option(
    "--address",
    metavar="HOST:PORT",
    help="The Ray cluster. Without it RAY_ADDRESS, then what `ray start` began here, then the only one here.",
)
POSITIVE = click.IntRange(1)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")


def _in_own_words(error: KVStoreError, command: str | None) -> str:
    """Return an error's text in one line, with options of a command in place of Python's arguments."""
    text = " ".join(str(error).split())
    for pattern, words in (*_OWN_WORDS, *_BY_COMMAND.get(command or "", _OWN_SETTINGS)):
        text = re.sub(pattern, words, text)
    if isinstance(error, ConfigError):
        text = _SIZE.sub(lambda size: f"{size[0]} ({human_bytes(int(size[0]))})", text)
    return text


def parse_size(option: str, text: str) -> int:
    """Return the number of bytes that an option names; errors name the option."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


class Seconds(click.FloatRange):
    """A time within bounds. Refuses NaN, which no comparison with a bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a number of seconds."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no time.", param, ctx)
        return seconds


class _Output(click.Path):
    """A file to be written later. Reports an unwritable folder before anything is measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        folder = Path(str(path)).absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            self.fail(f"{folder} is no folder that can be written to; make it first.", param, ctx)
        return path


#: Type of options that name a file to be written.
WrittenFile = _Output(dir_okay=False, writable=True, path_type=Path)
OUTPUT = click.option(
    "--output",
    type=WrittenFile,
    help="Also write the rows with hardware, versions and commit to this file.",
)

LANE = click.option(
    "--lane",
    type=click.Choice(["default", "tcp"]),
    default="default",
    show_default=True,
    help="'default' lets UCX choose: RDMA, shared memory on one host, then TCP.",
)
START_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(1.0, 3600.0),
    default=60.0,
    show_default=True,
    help="Seconds within which every node has to have its store.",
)


#: Of `kvstore doctor`.
_DOCTOR = (
    click.option(
        "--idle-seconds",
        type=Seconds(0.1, 3600.0),
        default=10.0,
        show_default=True,
        help="How long to measure an idle store.",
    ),
    click.option("--no-idle", is_flag=True, help="Do not measure it."),
    click.option(
        "--roundtrip", is_flag=True, help="Take blocks through memory, disk and a restart; compare all bytes."
    ),
    click.option(
        "--disk-path",
        default=None,
        help="Of --roundtrip: a folder of the disk to test; it makes its own in it. Default: a temporary one.",
    ),
)


def with_options(command: _Function, options: Sequence[Callable[[_Function], _Function]]) -> _Function:
    """Give a command several options, which its help shows in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def doctor_options(command: _Function) -> _Function:
    """Give a command the options of the doctor."""
    return with_options(command, _DOCTOR)


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse arguments of `kvstore.start` that no store can have, before a Ray is begun or joined.

    Raises:
        ConfigError: a setting cannot work.
    """
    fields = {"capacity": "capacity_bytes", "disk_capacity": "disk_capacity_bytes"}
    StoreConfig(**{fields.get(name, name): value for name, value in settings.items() if name != "timeout_s"})


def write_rows(rows: list[dict[str, Any]], as_json: bool, output: Path | None) -> None:
    """Write measured rows to a file, with their origin, and print them if they are wanted as JSON."""
    if output is not None:
        output.write_text(as_document({**provenance(), "rows": rows}))
    if as_json:
        click.echo(as_document(rows), nl=False)


class Command(click.Command):
    """A command that shows a KVStoreError as one line, or one JSON object, with exit status 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a size without its option gets a hint."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            size = next((word for word in given if word[:1].isdigit()), None)
            if size is None or self.name != "start" or "unexpected extra argument" not in error.message:
                raise
            hint = f"{error.message}; the memory of each node is given by --capacity {size}"
            raise click.UsageError(hint, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            kind, text = type(error).__name__, _in_own_words(error, self.name)
            if ctx.params.get("as_json"):
                click.echo(json.dumps({"error": kind, "text": text}))
            else:
                short = text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
                click.echo(f"{click.style(kind, fg='red', bold=True)}: {printable(short)}", err=True)
            ctx.exit(2)


class Group(click.Group):
    """Commands in the order of their definition."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in that order; click sorts them."""
        return list(self.commands)
