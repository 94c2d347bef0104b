"""Keeps the GPU fed: fresh batches from worker processes, and recent ones again when drawing cannot keep up."""

from __future__ import annotations

import collections
import queue
import random
import threading

import torch
from packing import Stream


class Feeder:
    """Hands out batches; a batch is shown at most `repeats` times in all."""

    def __init__(self, stream: Stream, workers: int, repeats: int, pin: bool) -> None:
        # Started here and not in the thread: create a Feeder before the first CUDA call, so that the forks are clean.
        self.stream = iter(
            torch.utils.data.DataLoader(
                stream, batch_size=None, num_workers=workers, prefetch_factor=2 if workers else None
            )
        )
        self.repeats, self.pin = repeats, pin
        self.fresh: queue.Queue[dict[str, torch.Tensor]] = queue.Queue(maxsize=4)
        self.recent: collections.deque[tuple[int, dict[str, torch.Tensor]]] = collections.deque(maxlen=96)
        self.rng = random.Random(stream.seed)
        self.drawn = self.shown = 0
        self.closing = threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._pull, daemon=True)
        self.thread.start()

    def _pull(self) -> None:
        try:
            for batch in self.stream:
                ready = {k: v.pin_memory() for k, v in batch.items()} if self.pin else batch
                while not self.closing.is_set():
                    try:
                        self.fresh.put(ready, timeout=0.5)
                        break
                    except queue.Full:
                        continue
                if self.closing.is_set():
                    return
        except BaseException as error:  # shown to the caller of next()
            self.failure = error

    def next(self) -> dict[str, torch.Tensor]:
        """A fresh batch if one is ready, else a recent one, else waits."""
        self.shown += 1
        try:
            batch = self.fresh.get_nowait()
        except queue.Empty:
            if len(self.recent) >= 16:
                at = self.rng.randrange(len(self.recent))
                left, batch = self.recent[at]
                del self.recent[at]
                if left > 1:
                    self.recent.append((left - 1, batch))
                return batch
            batch = self._wait()
        self.drawn += 1
        if self.repeats > 1:
            self.recent.append((self.repeats - 1, batch))
        return batch

    def _wait(self) -> dict[str, torch.Tensor]:
        while True:
            try:
                return self.fresh.get(timeout=5)
            except queue.Empty:
                if self.failure is not None:
                    raise RuntimeError("the drawing processes failed") from self.failure

    def close(self) -> None:
        """Stops the puller; the worker processes end with it."""
        self.closing.set()
        self.thread.join(timeout=10)
