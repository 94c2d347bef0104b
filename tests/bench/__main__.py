"""Benchmarks, one program: load over HTTP, sweeps, the engine and the encoder alone, accuracy, plots.

python -m tests.bench http --workload all --out result.json
python -m tests.bench sweep --over concurrency 1,2,4,8,16,32,64,128,256 --sizes 1024x1024 --out sweep.json
python -m tests.bench tokens --device cuda --dtype bfloat16 --out tokens.json
python -m tests.bench model-folder qwen2.5-vl-7b FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType

from tests.bench import model_folder
from tests.bench.load import http, plots, sweep
from tests.bench.tokens import command as tokens

COMMANDS: dict[str, ModuleType] = {
    "http": http,
    "sweep": sweep,
    "plot": plots,
    "tokens": tokens,
    "model-folder": model_folder,
}
PROGRAMS = {"engine": "the LM engine alone, offline", "encoder": "the vision encoder alone, offline"}
"""Programs with arguments of their own."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
    for name, text in PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    args, rest = parser.parse_known_args(arguments)
    if args.command in PROGRAMS:
        return subprocess.run([sys.executable, "-m", f"tests.bench.bench_{args.command}", *rest]).returncode
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return COMMANDS[args.command].main(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
