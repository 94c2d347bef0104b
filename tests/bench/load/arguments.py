"""Command-line arguments of everything that puts load on a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tests.bench.load.prepare import token_counter
from tests.bench.load.runner import Runner, Server
from tests.bench.load.workload import Popularity, SizeMix, Workload

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
_FIELDS = (
    "requests", "concurrency", "images", "sizes", "pool", "popularity", "text_characters", "text_tokens",
    "out_tokens", "seed",
)  # fmt: skip


def readable(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argument's type, with its own message when it fails."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    server.add_argument("--model", help=f"its name there (default: the first it lists); the key is in ${KEY_VARIABLE}")
    load = parser.add_argument_group("requests")
    load.add_argument("--requests", type=int, metavar="N", help="(default: 100)")
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: clients at once (default: 16)")
    load.add_argument("--rate", type=float, metavar="R", help="open loop: a Poisson process of R requests a second")
    load.add_argument("--images", type=int, metavar="N", help="pictures of one request, 0 or more (default: 1)")
    load.add_argument(
        "--sizes", type=readable(SizeMix.parse), metavar="MIX",
        help="of pictures: 1024x1024 (the default), 224x224,336x336, or 224x224:0.3,1024x1024:0.1",
    )  # fmt: skip
    load.add_argument("--pool", type=int, metavar="K", help="draw from K pictures; 0, the default: all distinct")
    load.add_argument(
        "--popularity", type=readable(Popularity.parse), metavar="P",
        help="in the pool: zipf:S (S = 0 is uniform) or pareto:S (default: zipf:1)",
    )  # fmt: skip
    load.add_argument("--text-characters", type=int, metavar="N", help="(default: 128)")
    load.add_argument("--text-tokens", type=int, metavar="N", help="instead of characters; needs --tokenizer")
    load.add_argument("--tokenizer", type=Path, help="tokenizer.json, or a model folder with one")
    load.add_argument("--out-tokens", type=int, metavar="N", help="of every answer, exactly (default: 128)")
    load.add_argument(
        "--seed", type=int, metavar="N",
        help="equal seeds ask equal questions, so that a second run on one server finds them cached (default: 1)",
    )  # fmt: skip
    run = parser.add_argument_group("run")
    run.add_argument(
        "--warm-up", type=int, default=0, metavar="N", help="rounds before the clock (default: %(default)s)"
    )
    run.add_argument(
        "--cache", choices=("cold", "warm"), default="cold",
        help="warm-up asks about other pictures (cold) or the very same (warm) (default: %(default)s)",
    )  # fmt: skip
    run.add_argument("--processes", type=int, default=1, help="that send; for many clients (default: %(default)s)")
    run.add_argument("--seconds", type=float, default=float("inf"), help="no request begins later (default: no limit)")
    run.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer (default: %(default)s)")
    run.add_argument("--label", default="", help="what was measured, for the record and for plots")
    run.add_argument("--no-progress", action="store_true")


def workload_of(args: argparse.Namespace, base: Workload | None = None) -> Workload:
    """The workload that the arguments describe, starting from `base`.

    Raises:
        ValueError: A value is off, or two do not go together.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if args.rate is not None:
        given = {"concurrency": 0, **given, "rate_per_s": args.rate}
    workload = replace(base or Workload(), **given)
    if workload.text_tokens and args.tokenizer is None:
        raise ValueError("--text-tokens needs --tokenizer")
    return workload


def runner_of(args: argparse.Namespace, **options: Any) -> Runner:
    """Raises ServerError, or ValueError for a value that is off."""
    for name, least in (("processes", 1), ("warm_up", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    if args.cache == "warm" and not args.warm_up:
        raise ValueError("--cache warm needs --warm-up of at least 1")
    settings: dict[str, Any] = {
        "processes": args.processes,
        "warm_up_rounds": args.warm_up,
        "cache": args.cache,
        "seconds": args.seconds,
        "timeout_s": args.timeout,
        "count_tokens": None if args.tokenizer is None else token_counter(args.tokenizer),
        "progress": not args.no_progress,
    }
    return Runner(server=Server.find(args.url, args.model, os.environ.get(KEY_VARIABLE)), **{**settings, **options})
