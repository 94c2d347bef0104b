"""What README tells a newcomer to type works as it stands, against the server that `make serve` starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.serve.conftest import ROOT, RunningServer

README = (ROOT / "README.md").read_text()
ANSWER = "The picture shows 2 shapes on a blue background: a white star at the bottom left and a green circle at the"


def snippet(language: str, holding: str, server: RunningServer) -> str:
    blocks = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if holding in text]
    assert len(blocks) == 1, f"README has {len(blocks)} blocks of {language} with {holding!r}"
    assert "http://127.0.0.1:8000" in blocks[0]
    return str(blocks[0]).replace("http://127.0.0.1:8000", server.url)


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_request_is_answered_right(server: RunningServer) -> None:
    answer = json.loads(run("bash", "-c", snippet("sh", "curl", server)))
    assert answer["choices"][0]["message"]["content"].startswith(ANSWER)


def test_the_openai_client_streams_the_same_answer(server: RunningServer) -> None:
    assert run(sys.executable, "-c", snippet("python", "openai", server)).startswith(ANSWER)
