"""`python -m tests.bench tokens`: how many greedy answers of the shipped model a precision leaves as they are.

Reference is this engine in float32 on the CPU, over the questions that the model is evaluated on; all stages run in
this process. Counted are answers equal to the last token, tokens up to the first difference, and right answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "accuracy of a precision: tokens of the shipped model against float32 on the CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=5, help="questions of every kind (default: %(default)s)")
    parser.add_argument("--kinds", default="", help="only these kinds, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("fp8",), help="of the language model")
    parser.add_argument("--encoder-dtype", choices=("bfloat16", "float16", "float32"), help="(default: as --dtype)")
    parser.add_argument("--encoder-quantization", choices=("fp8",), help="of the vision encoder")
    parser.add_argument("--concurrency", type=int, default=16, help="questions at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0, the default, leaves torch's choice")
    parser.add_argument("--reference", type=Path, help="float32 answers: read if the file exists, else written")
    parser.add_argument("--least-equal", type=float, default=0.0, help="exit with 1 below this share of equal answers")
    parser.add_argument("--out", type=Path, help="results as JSON")


def main(args: argparse.Namespace) -> int:
    """0; 1 if fewer answers than wanted are equal; 2 if the options are off."""
    # Load is put on servers from machines without torch, too.
    from tests.bench.tokens.measure import run

    return run(args)
