"""Asks one question on the status page of a running application, in a headless Chromium, and keeps the picture.

python -m tests.bench.status_page_screenshot --target http://127.0.0.1:8000 --picture cat.jpg --out docs/status_page.png
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.unit.app.chromium import browser_tab


async def screenshot(target: str, picture: Path, question: str, *, width: int, dark: bool) -> tuple[bytes, list[str]]:
    """(PNG of the page once the answer has ended, what the page complained about)."""
    with tempfile.TemporaryDirectory() as profile:
        async with browser_tab(Path(profile)) as tab:
            await tab.look(width=width, height=900, dark=dark)
            await tab.open(target + "/")
            await tab.until("document.querySelector('#model').value && document.querySelector('#gauges meter')")
            await tab.choose_file("#picture", picture)
            await tab.until("!document.querySelector('#preview').hidden")
            await tab.write("#question", question)
            await tab.press("Enter", code=13, ctrl=True)
            await tab.until("document.querySelector('#send').disabled === false", limit_s=300)
            await tab.value("document.activeElement.blur()")
            said = await tab.text("#problem")
            return await tab.screenshot(), [*tab.problems, *([said] if said else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="http://127.0.0.1:8000")
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--question", default="What is in this picture?")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    png, problems = asyncio.run(
        screenshot(args.target.rstrip("/"), args.picture.resolve(), args.question, width=args.width, dark=args.dark)
    )
    Image.open(io.BytesIO(png)).quantize(128).save(args.out, optimize=True)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
