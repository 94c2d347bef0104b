"""Writes examples/ and examples.json: a few small pictures with questions that the model in FOLDER answers rightly.

    python make_examples.py FOLDER

Exit status 1 if some kind yields no right answer among the first seeds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from dialogues import KINDS, Dialogue, make
from evaluate import normal
from hf import Reader
from mixture import SHARES
from tqdm import tqdm

HERE = pathlib.Path(__file__).parent
FIRST_SEED = 900_000_000  # neither evaluated nor trained on
MOST_BYTES = 8_000  # a picture


def fits(talk: Dialogue, brief: bool) -> bool:
    """Small pictures, and no page of filler."""
    small = all(len(p.encoded()[0]) <= MOST_BYTES and min(p.image.size) >= 8 for p in talk.pictures)
    return small and (not brief or sum(len(p) for t in talk.turns for p in t.parts if isinstance(p, str)) < 400)


def store(talk: Dialogue, name: str, folder: pathlib.Path) -> dict:
    """Writes the pictures; returns the entry for examples.json."""
    paths = []
    for i, picture in enumerate(talk.pictures):
        data, kind = picture.encoded()
        mark = f"_{i + 1}" if len(talk.pictures) > 1 else ""
        path = folder / f"{name}{mark}.{'jpg' if kind == 'image/jpeg' else 'png'}"
        path.write_bytes(data)
        paths.append(f"{folder.name}/{path.name}")
    messages = talk.messages()
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                p if p["type"] == "text" else {"type": "image", "path": paths[p["index"]]} for p in message["content"]
            ]
    question = next((p for p in reversed(talk.turns[-1].parts) if isinstance(p, str)), "")
    return {
        "name": name,
        "kind": talk.kind,
        "pictures": paths,
        "question": question,
        "messages": messages,
        "answer": talk.turns[-1].answer,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write example pictures and questions that the model answers rightly.")
    parser.add_argument("folder", type=pathlib.Path, help="the model's folder")
    parser.add_argument("--tries", type=int, default=80, help="seeds to try for each kind")
    args = parser.parse_args()
    reader = Reader(str(args.folder))
    out = HERE / "examples"
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    entries, missing = [], []
    for kind in tqdm(KINDS, unit="kind"):
        wanted = 2 if SHARES[kind][0] >= 5 else 1
        found = 0
        for seed in range(FIRST_SEED, FIRST_SEED + args.tries):
            talk = make(kind, seed)
            if fits(talk, kind != "long_text") and normal(reader.answer(talk)) == normal(talk.turns[-1].answer):
                found += 1
                entries.append(store(talk, f"{kind}_{found}", out))
                if found == wanted:
                    break
        if not found:
            missing.append(kind)
    (HERE / "examples.json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{len(entries)} examples written" + (f"; none for {', '.join(missing)}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
