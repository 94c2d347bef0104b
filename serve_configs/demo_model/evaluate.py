"""Scores the model on held-out conversations: exact match, by kind of question.

    python evaluate.py --folder . --processes 4
    python evaluate.py --url http://127.0.0.1:8000/v1 --model demo --concurrency 8

Both ways ask the same seeded conversations, none of which is in the training mixture. An answer is right if it equals
the reference but for case, outer space and a final full stop. Exit status: 0 if the bars are met, 1 if not, 2 if the
arguments are off or the server cannot be reached.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import multiprocessing
import pathlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialogues import KINDS, Dialogue, make
from tqdm import tqdm

if TYPE_CHECKING:
    from hf import Reader

LONGEST_ANSWER = 200  # tokens
FAILED = "[failed]"  # begins what stands in for an answer that the server did not give; it counts as wrong
# Spelling out what it has never seen is beyond the model's task: asked and shown, but no part of the bars.
BEYOND = ("letters", "unseen_word")


def normal(text: str) -> str:
    """What is compared."""
    return text.strip().lower().removesuffix(".")


@functools.cache
def reader(folder: str, dtype: str, device: str, threads: int) -> Reader:
    """The model, loaded once in each process."""
    from hf import Reader

    return Reader(folder, dtype, device, threads)


@dataclass(frozen=True, slots=True)
class Local:
    """Answers through transformers' generate()."""

    folder: str
    dtype: str
    device: str
    threads: int

    def answer(self, job: tuple[str, int]) -> str:
        return reader(self.folder, self.dtype, self.device, self.threads).answer(make(*job))


@dataclass(frozen=True, slots=True)
class Server:
    """Answers from an OpenAI-compatible server; pictures travel as data URIs."""

    url: str
    model: str
    key: str | None
    timeout: float

    def answer(self, job: tuple[str, int]) -> str:
        body = {
            "model": self.model,
            "messages": openai_messages(make(*job)),
            "temperature": 0,
            "max_tokens": LONGEST_ANSWER,
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return json.load(reply)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as error:
            return f"{FAILED} status {error.code}: {error.read(200).decode(errors='replace')}"
        except TimeoutError:
            return f"{FAILED} no answer within {self.timeout:g} s"


def openai_messages(talk: Dialogue) -> list[dict]:
    """The conversation with its pictures as data URIs."""
    messages = talk.messages()
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [with_data(talk, part) for part in message["content"]]
    return messages


def with_data(talk: Dialogue, part: dict) -> dict:
    if part["type"] != "image":
        return part
    data, kind = talk.pictures[part["index"]].encoded()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}


def answers(args: argparse.Namespace, jobs: list[tuple[str, int]]) -> Iterator[str]:
    """The replies, in the order of the jobs."""
    if args.url:
        server = Server(args.url, args.model, args.key, args.timeout)
        with ThreadPoolExecutor(args.concurrency) as pool:
            yield from pool.map(server.answer, jobs)
        return
    local = Local(str(args.folder), args.dtype, args.device, args.threads)
    if args.processes == 1:
        yield from map(local.answer, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        yield from pool.imap(local.answer, jobs, chunksize=4)


def table(jobs: list[tuple[str, int]], replies: list[str]) -> dict:
    """Counts by kind, and a few of the wrong answers."""
    kinds: dict[str, dict] = {}
    for (kind, seed), got in zip(jobs, replies, strict=True):
        talk = make(kind, seed)
        want = talk.turns[-1].answer
        row = kinds.setdefault(kind, {"right": 0, "of": 0, "share": 0.0, "wrong": []})
        row["of"] += 1
        if normal(got) == normal(want):
            row["right"] += 1
        elif len(row["wrong"]) < 5:
            asked = next((p for p in reversed(talk.turns[-1].parts) if isinstance(p, str)), "")
            row["wrong"].append({"seed": seed, "asked": asked[-120:], "want": want, "got": got})
        row["share"] = round(row["right"] / row["of"], 4)
    failed = [
        {"kind": k, "seed": s, "error": r} for (k, s), r in zip(jobs, replies, strict=True) if r.startswith(FAILED)
    ]
    return {
        "failed": failed,
        "overall": share_of(kinds, beyond=False),
        "overall_with_beyond": share_of(kinds, beyond=True),
        "beyond_its_task": [k for k in kinds if k in BEYOND],
        "kinds": kinds,
    }


def share_of(kinds: dict[str, dict], beyond: bool) -> float:
    """The share of right answers over all kinds, with or without those beyond the model's task."""
    rows = [row for kind, row in kinds.items() if beyond or kind not in BEYOND]
    return round(sum(r["right"] for r in rows) / max(1, sum(r["of"] for r in rows)), 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the demo model on held-out conversations.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=pathlib.Path, help="a model folder, run through transformers")
    where.add_argument("--url", help="the base URL of an OpenAI-compatible server, ending in /v1")
    parser.add_argument("--model", default="demo", help="the model's name on the server")
    parser.add_argument("--key", help="the server's API key")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight at the server")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one answer")
    parser.add_argument("--each", type=int, default=200, help="conversations of every kind")
    parser.add_argument("--kinds", default="", help="only these kinds, separated by commas")
    parser.add_argument("--processes", type=int, default=1, help="processes for --folder")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the table as JSON")
    parser.add_argument("--bar", type=float, default=0.95, help="the share of right answers wanted overall")
    parser.add_argument("--kind-bar", type=float, default=0.9, help="the share wanted for every kind")
    args = parser.parse_args()
    unknown = {k for k in args.kinds.split(",") if k} - set(KINDS)
    if unknown:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return args


def main() -> int:
    args = parse()
    kinds = [k for k in args.kinds.split(",") if k] or list(KINDS)
    jobs = [(kind, seed) for kind in kinds for seed in range(args.each)]
    try:
        replies = list(tqdm(answers(args, jobs), total=len(jobs), unit="question"))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        print(f"the server did not answer: {error}", file=sys.stderr)
        return 2
    result = table(jobs, replies)
    for kind, row in result["kinds"].items():
        note = "  (beyond its task)" if kind in BEYOND else ""
        print(f"{kind:18} {row['right']:5} of {row['of']:5}  {row['share']:7.1%}{note}")
    print(f"{'overall':18} {result['overall']:7.1%}")
    print(f"{'with all kinds':18} {result['overall_with_beyond']:7.1%}")
    if result["failed"]:
        print(f"{len(result['failed'])} questions got no answer, the first: {result['failed'][0]}", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    asked = {kind: row["share"] for kind, row in result["kinds"].items() if kind not in BEYOND}
    met = not asked or (result["overall"] >= args.bar and min(asked.values()) >= args.kind_bar)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
