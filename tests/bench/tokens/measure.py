"""Asks the evaluation set twice and compares: the work behind `python -m tests.bench tokens`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from tqdm import tqdm

from deployments.checkpoint import weight_files
from deployments.lm_engine.config import EngineConfig
from deployments.vision_encoder.config import EncoderConfig
from tests.bench import record
from tests.bench.load.report import table
from tests.bench.tokens.agreement import Pair, agreement, by_kind
from tests.bench.tokens.questions import MODEL, Question, is_right, questions
from tests.bench.tokens.stack import Answer, open_stack

KV_BYTES = 256 << 20
CACHE_BYTES = 256 << 20


def run(args: argparse.Namespace) -> int:
    """0; 1 if fewer answers than wanted are equal; 2 if the options are off."""
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        if min(args.each, args.concurrency) < 1:
            raise ValueError("--each and --concurrency must be at least 1")
        asked = questions(args.each, [kind for kind in args.kinds.split(",") if kind])
        expected = references(asked, args)
        began_s = time.perf_counter()
        found = ask_all(asked, *configs(args), args.concurrency, f"{args.device} {args.dtype}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pairs = [
        Pair(
            question.kind,
            expected[question.name].token_ids,
            found[question.name].token_ids,
            is_right(question, expected[question.name].text),
            is_right(question, found[question.name].text),
        )
        for question in asked
    ]
    result = {
        **record.header("tokens", "tests.bench"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "options": {name: getattr(args, name) for name in OPTIONS},
        "seconds": round(time.perf_counter() - began_s, 2),
        "overall": agreement(pairs),
        "kinds": by_kind(pairs),
        "differences": differences(asked, expected, found),
    }
    print(rows(result))
    print(json.dumps(result["overall"]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 1 if result["overall"]["equal_answers"] < args.least_equal else 0


OPTIONS = ("each", "device", "dtype", "quantization", "encoder_dtype", "encoder_quantization", "concurrency")


def configs(args: argparse.Namespace) -> tuple[EngineConfig, EncoderConfig]:
    """Options of the two stages. What was not asked for is not passed, so that a default stays a default."""
    engine: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
    encoder: dict[str, Any] = {"quantization": args.encoder_quantization} if args.encoder_quantization else {}
    return (
        EngineConfig(
            model=str(MODEL),
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=args.concurrency,
            max_num_batched_tokens=2048,
            kv_cache_bytes=KV_BYTES,
            max_queued_requests=0,  # A slow machine is no reason to refuse a question.
            max_queue_s=0,
            request_timeout_s=0,
            **engine,
        ),
        EncoderConfig(
            model=str(MODEL),
            device=args.device,
            dtype=args.encoder_dtype or args.dtype,
            cache_bytes=CACHE_BYTES,
            **encoder,
        ),
    )


def references(asked: Sequence[Question], args: argparse.Namespace) -> dict[str, Answer]:
    """Answers in float32 on the CPU, from the file if there is one.

    Raises:
        ValueError: The file is of other weights or lacks questions.
    """
    weights = weights_digest(MODEL)
    path: Path | None = args.reference
    if path is not None and path.is_file():
        stored = json.loads(path.read_text())
        if stored.get("weights") != weights:
            raise ValueError(f"{path} was made with other weights; remove it to have it made again")
        if missing := [question.name for question in asked if question.name not in stored["answers"]]:
            raise ValueError(f"{path} lacks {len(missing)} questions, the first: {missing[0]}")
        return {name: Answer(tuple(entry["tokens"]), entry["text"]) for name, entry in stored["answers"].items()}
    plain = dict.fromkeys(("quantization", "encoder_dtype", "encoder_quantization"))
    exact = argparse.Namespace(**{**vars(args), **plain, "device": "cpu", "dtype": "float32"})
    answers = ask_all(asked, *configs(exact), args.concurrency, "cpu float32")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: {"tokens": answer.token_ids, "text": answer.text} for name, answer in answers.items()}
        path.write_text(json.dumps({"weights": weights, "answers": kept}, ensure_ascii=False) + "\n")
    return answers


def weights_digest(folder: Path) -> str:
    """Of the weights' bytes, so that it is the same on every machine."""
    hasher = blake3()
    for path in weight_files(folder):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def ask_all(
    asked: Sequence[Question], engine: EngineConfig, encoder: EncoderConfig, concurrency: int, title: str
) -> dict[str, Answer]:
    """Every question's answer by name."""
    return asyncio.run(_ask_all(asked, engine, encoder, concurrency, title))


async def _ask_all(
    asked: Sequence[Question], engine: EngineConfig, encoder: EncoderConfig, concurrency: int, title: str
) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    waiting = iter(asked)
    async with open_stack(MODEL, engine, encoder) as stack:
        with tqdm(total=len(asked), desc=title, unit="question") as bar:

            async def client() -> None:
                for question in waiting:
                    answers[question.name] = await stack.answer(question.body)
                    bar.update()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(asked))):
                    group.create_task(client())
    return answers


def differences(
    asked: Sequence[Question], expected: Mapping[str, Answer], found: Mapping[str, Answer], most: int = 20
) -> list[dict[str, str]]:
    """The first few questions that are answered otherwise."""
    return [
        {"question": q.name, "wanted": q.reference, "float32": expected[q.name].text, "got": found[q.name].text}
        for q in asked
        if expected[q.name].token_ids != found[q.name].token_ids
    ][:most]


def rows(result: Mapping[str, Any]) -> str:
    lines = [["", "questions", "equal answers", "equal tokens", "right in float32", "right"]]
    for name, entry in [*result["kinds"].items(), ("overall", result["overall"])]:
        shares = (entry[key] for key in ("equal_answers", "equal_tokens", "reference_right", "right"))
        lines.append([name, str(entry["questions"]), *("" if s is None else f"{s:.1%}" for s in shares)])
    return table(lines)
