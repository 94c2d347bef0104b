"""`python -m cache_service`: look into the shared cache tier and clean it up.

    count      entries and bytes by kind, namespace label and model label
    inspect    headers of entries, one a line
    verify     read every entry whole and check it; --delete removes the bad ones
    purge      delete entries by kind, namespace, model or age
    hash-key   read an API key from standard input, print the form in which it is stored
    new-key    print a fresh API key and its stored form

Exit codes: 0 done, 1 verify found bad entries, 2 wrong usage, 3 the server cannot be reached or stopped answering.
Results go to standard output, progress and trouble to standard error. Passwords come from the URL or, better, from the
environment: SIGHTLINE_REDIS_URL, SIGHTLINE_REDIS_PASSWORD.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from cache_service.identity import SCHEMA_VERSION
from cache_service.redis_admin import Entry, RedisAdmin, Selection
from cache_service.redis_config import RedisTierConfig
from cache_service.redis_link import LinkError
from cache_service.tenants import hash_api_key

EXIT_OK, EXIT_BAD_ENTRIES, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3

URL_VARIABLE = "SIGHTLINE_REDIS_URL"
PASSWORD_VARIABLE = "SIGHTLINE_REDIS_PASSWORD"

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_AGE_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Console:
    """Where the tool reads and writes."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO

    def say(self, text: str) -> None:
        print(text, file=self.stdout)

    def warn(self, text: str) -> None:
        print(text, file=self.stderr)


def run(arguments: Sequence[str], environment: Mapping[str, str], console: Console) -> int:
    """The exit code of one invocation."""
    parser = _parser(environment)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    if options.command == "hash-key":
        return _hash_key(console)
    if options.command == "new-key":
        return _new_key(console)
    if not options.url:
        console.warn(f"no server: give --url or set {URL_VARIABLE}")
        return EXIT_USAGE
    try:
        config = RedisTierConfig(
            url=options.url,
            password=environment.get(PASSWORD_VARIABLE) or None,
            tls_ca_file=options.tls_ca_file,
            key_prefix=options.prefix,
            max_bytes=2**40,
            read_timeout_s=options.timeout,
            write_timeout_s=options.timeout,
            connect_timeout_s=options.timeout,
        )
    except ValueError as error:
        console.warn(str(error))
        return EXIT_USAGE
    return asyncio.run(_run_on_server(options, config, console))


async def _run_on_server(options: argparse.Namespace, config: RedisTierConfig, console: Console) -> int:
    admin = RedisAdmin(config, schema=options.schema)
    try:
        if not await admin.start():
            console.warn("the server cannot be reached, or refuses us")
            return EXIT_UNREACHABLE
        selection = Selection(
            kind=options.kind,
            namespace=options.namespace,
            model=options.model,
            created_before_s=None if options.older_than is None else time.time() - options.older_than,
        )
        command = {"count": _count, "inspect": _inspect, "verify": _verify, "purge": _purge}[options.command]
        return await command(admin, selection, options, console)
    except LinkError as error:
        console.warn(f"the server stopped answering: {error}")
        return EXIT_UNREACHABLE
    finally:
        await admin.close()


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------
async def _count(admin: RedisAdmin, selection: Selection, options: argparse.Namespace, console: Console) -> int:
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    with await _progress(admin, console, options.quiet) as bar:
        async for entries in admin.entries(selection):
            bar.update(len(entries))
            for entry in entries:
                header = entry.header
                labels = (
                    ("unreadable", "-") if header is None else (_hex(header.namespace_label), _hex(header.model_label))
                )
                total = totals[(entry.kind, *labels)]
                total[0] += 1
                total[1] += entry.value_bytes
    if options.json:
        for (kind, namespace, model), (number, num_bytes) in sorted(totals.items()):
            row = {"kind": kind, "namespace": namespace, "model": model, "entries": number, "bytes": num_bytes}
            console.say(json.dumps(row))
        return EXIT_OK
    console.say(f"{'kind':<12} {'namespace':<16} {'model':<16} {'entries':>9} {'bytes':>15}")
    for (kind, namespace, model), (number, num_bytes) in sorted(totals.items()):
        console.say(f"{kind:<12} {namespace:<16} {model:<16} {number:>9,} {num_bytes:>15,}")
    entries_sum, bytes_sum = (sum(total[column] for total in totals.values()) for column in (0, 1))
    console.say(f"{'total':<12} {'':<16} {'':<16} {entries_sum:>9,} {bytes_sum:>15,}")
    return EXIT_OK


async def _inspect(admin: RedisAdmin, selection: Selection, options: argparse.Namespace, console: Console) -> int:
    shown = 0
    async for entries in admin.entries(selection):
        for entry in entries:
            if shown == options.limit:
                console.warn(f"stopped after {shown} entries; --limit shows more")
                return EXIT_OK
            console.say(json.dumps(_as_row(entry)))
            shown += 1
    return EXIT_OK


async def _verify(admin: RedisAdmin, selection: Selection, options: argparse.Namespace, console: Console) -> int:
    checked, bad = 0, 0
    with await _progress(admin, console, options.quiet) as bar:
        async for entries in admin.entries(selection):
            for entry in entries:
                problem = entry.problem or await admin.verify(entry)
                checked += 1
                bar.update(1)
                if not problem:
                    continue
                bad += 1
                console.say(f"{entry.kind} {entry.key.hex()}: {problem}")
                if options.delete:
                    await admin.delete([entry])
    console.say(f"{checked} entries read, {bad} bad{', deleted' if bad and options.delete else ''}")
    return EXIT_BAD_ENTRIES if bad else EXIT_OK


async def _purge(admin: RedisAdmin, selection: Selection, options: argparse.Namespace, console: Console) -> int:
    if selection.is_everything and not options.all:
        console.warn("purge needs --kind, --namespace, --model or --older-than; --all deletes every entry")
        return EXIT_USAGE
    if not options.dry_run and not options.yes:
        console.warn("Delete the selected entries? They are computed again when needed. [y/N]")
        if console.stdin.readline().strip().lower() not in ("y", "yes"):
            console.warn("nothing deleted")
            return EXIT_OK
    number, num_bytes = 0, 0
    with await _progress(admin, console, options.quiet) as bar:
        async for entries in admin.entries(selection):
            number += len(entries) if options.dry_run else await admin.delete(entries)
            num_bytes += sum(entry.value_bytes for entry in entries)
            bar.update(len(entries))
    console.say(f"{'would delete' if options.dry_run else 'deleted'} {number:,} entries, {num_bytes:,} bytes")
    return EXIT_OK


def _hash_key(console: Console) -> int:
    key = console.stdin.readline().strip()
    if not key:
        console.warn("give the key on standard input")
        return EXIT_USAGE
    console.say(hash_api_key(key))
    return EXIT_OK


def _new_key(console: Console) -> int:
    key = "sl-" + secrets.token_urlsafe(32)
    console.say(f"key       {key}")
    console.say(f"key_hash  {hash_api_key(key)}")
    return EXIT_OK


# ---------------------------------------------------------------------------------------------------------------------
# Options and output
# ---------------------------------------------------------------------------------------------------------------------
def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m cache_service", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--url", default=environment.get(URL_VARIABLE), help=f"server; default: {URL_VARIABLE}")
    common.add_argument("--tls-ca-file", help="PEM file of authorities to trust")
    common.add_argument("--prefix", default="sightline", help="first word of every key (default: %(default)s)")
    common.add_argument(
        "--schema", type=int, default=SCHEMA_VERSION, help="schema of the entries to look at (default: %(default)s)"
    )
    common.add_argument("--timeout", type=_seconds, default=10.0, help="seconds for one round trip (default: 10)")
    common.add_argument("--quiet", action="store_true", help="no progress bar")
    common.add_argument("--kind", help="only entries of this kind, such as embedding or item")
    common.add_argument("--namespace", help="only entries of this cache namespace, such as tenant:acme")
    common.add_argument("--model", help="only entries of this model id")
    common.add_argument("--older-than", type=_age, metavar="AGE", help="only entries written before: 90s 30m 12h 7d 2w")
    count = commands.add_parser("count", parents=[common], help="entries and bytes by kind, namespace and model")
    count.add_argument("--json", action="store_true", help="one JSON object a line")
    inspect = commands.add_parser("inspect", parents=[common], help="headers of entries as JSON, one a line")
    inspect.add_argument("--limit", type=int, default=100, help="stop after so many entries (default: %(default)s)")
    verify = commands.add_parser("verify", parents=[common], help="read and check entries whole")
    verify.add_argument("--delete", action="store_true", help="delete bad entries")
    purge = commands.add_parser("purge", parents=[common], help="delete entries")
    purge.add_argument("--all", action="store_true", help="every entry of the schema, if nothing narrows it")
    purge.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    purge.add_argument("--yes", action="store_true", help="don't ask")
    commands.add_parser("hash-key", help="API key from standard input to its stored form")
    commands.add_parser("new-key", help="make an API key")
    return parser


def _age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"an age is a number and one of s m h d w, such as 7d: {text!r}")
    return float(match[1]) * _AGE_UNIT_S[match[2]]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"seconds must be above 0: {text!r}")
    return seconds


async def _progress(admin: RedisAdmin, console: Console, quiet: bool) -> tqdm:
    """Counts entries against the server's keys: an upper bound, since it may hold others and parts of large values."""
    return tqdm(total=await admin.num_keys(), unit=" keys", file=console.stderr, disable=True if quiet else None)


def _as_row(entry: Entry) -> dict[str, object]:
    row: dict[str, object] = {
        "kind": entry.kind,
        "key": entry.key.hex(),
        "bytes": entry.value_bytes,
        "ttl_s": None if math.isinf(entry.ttl_s) else round(entry.ttl_s),
    }
    header = entry.header
    if header is None:
        return row | {"problem": entry.problem}
    return row | {
        "holds": header.kind,
        "dtype": header.dtype,
        "shape": list(header.shape),
        "grid": list(header.grid),
        "created": _date(header.created_s),
        "namespace": _hex(header.namespace_label),
        "model": _hex(header.model_label),
    }


def _date(unix_s: int) -> str:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
    except (ValueError, OverflowError, OSError):  # headers are shown unverified
        return f"impossible: {unix_s}"


def _hex(raw: bytes) -> str:
    return raw.hex()
