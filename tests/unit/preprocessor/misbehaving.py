"""A processor for worker processes that does what the bytes say. Imports little: every process imports this."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from deployments.errors import MediaError
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions


class Misbehaving:
    """Stand-in for MediaProcessor."""

    def inspect(self, modality: str, data: EncodedMedia, options: MediaOptions) -> Inspection:
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == b"hang":
            time.sleep(60)
        if data == b"spin":
            while True:
                pass
        if data == b"hog":
            bytearray(1 << 40)
        if data == b"refuse":
            raise MediaError("no", code="invalid_image")
        if data == b"bug":
            raise KeyError("secret")
        return Inspection(size=(len(data), os.getpid()))

    def remake(self, modality: str, data: EncodedMedia, processing: dict[str, int]) -> np.ndarray:
        assert isinstance(data, bytes)
        return np.frombuffer(data, np.uint8).reshape(processing["rows"], -1)


class Unstartable(Misbehaving):
    def __init__(self) -> None:
        os._exit(1)
