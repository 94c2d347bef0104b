"""Rank 0's side: says each step to the other ranks before it runs its own share, and notices when one of them is lost.

A gang lives and dies as one. Once a rank is gone, or has failed where the others did not, nothing that comes after can
be right: every further call raises ReplicaLostError, the health check fails, and the replica is replaced with all its
ranks.
"""

from __future__ import annotations

import logging
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from cache_service.identity import EmbeddingIdentity
from deployments.errors import InternalError, ReplicaLostError, SightlineError
from deployments.lm_engine.attention import AttentionBackend
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.model_runner import DecodeReplay, MixedReplay, ModelRunner
from deployments.lm_engine.plan import StepPlan
from deployments.lm_engine.sampler import PendingSamples, Sample, Sampler, SamplingState
from deployments.lm_engine.tensor_parallel import wire
from deployments.lm_engine.tensor_parallel.channel import Address, Channel, Lobby
from deployments.lm_engine.tensor_parallel.group import COLLECTIVE_TIMEOUT_S, Store, TensorParallelGroup, serve_store

_LOG = logging.getLogger(__name__)


class Gathering:
    """What other ranks need to join: made before they are started.

    Args:
        host: Address of this machine that they can reach.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self._size = size
        self._lobby = Lobby(host)
        self._store = serve_store(host)

    @property
    def address(self) -> Address:
        return self._lobby.address(self._store.port)

    def join(
        self,
        device: torch.device,
        *,
        join_timeout_s: float = 300.0,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> Leader:
        """Wait until all ranks are there.

        Args:
            timeout_s: Of each collective.
            check: Called now and then meanwhile; raises if it is no use to wait on.

        Raises:
            ReplicaLostError: They did not come, or did not find each other.
        """
        ranks = range(1, self._size)
        try:
            channels = self._lobby.accept(ranks, join_timeout_s, check)
            for channel in channels.values():
                channel.send(wire.encode_all_here())
            return Leader(channels, self._store, self._size, device, timeout_s)
        except (OSError, RuntimeError) as exc:
            raise ReplicaLostError(f"the ranks of the language model did not come together: {exc}") from exc
        finally:
            self._lobby.close()


class Leader:
    """The other ranks, as rank 0 sees them.

    Args:
        channels: By rank.
        timeout_s: Of each collective.
    """

    def __init__(
        self, channels: Mapping[int, Channel], store: Store, size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._channels = dict(channels)
        self._store = store  # served from here: it must live as long as the group
        self.group = TensorParallelGroup(store, 0, size, device, minimum=self._minimum, timeout_s=timeout_s)
        self._reason: str | None = None
        """Why the gang has been given up."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._watcher = threading.Thread(target=self._watch, name="tensor-parallel-watch", daemon=True)

    def start(self) -> None:
        """Watch the channels from now on; called once, when all ranks are ready for steps."""
        self._watcher.start()

    def check(self) -> None:
        """Raise ReplicaLostError if a rank has been lost. Callable from any thread."""
        if self._reason is not None:
            raise ReplicaLostError(self._reason)

    def send(self, message: bytes) -> None:
        """Tell all ranks.

        Raises:
            ReplicaLostError: One of them is gone.
        """
        self.check()
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except OSError as exc:
                raise self.lose(f"rank {rank} cannot be reached: {exc}") from exc

    def lose(self, reason: str) -> ReplicaLostError:
        """Give the gang up; the first reason stands. Returns the error to raise."""
        with self._lock:
            if self._reason is None:
                self._reason = f"a rank of the language model is lost: {reason}"
                if not self._is_closed:
                    _LOG.error("tensor parallel: %s", reason)
        # Ends what this rank waits for, and through the channels what ranks that are alive wait for.
        for channel in self._channels.values():
            channel.close()
        self.group.close()
        return ReplicaLostError(self._reason)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what all ranks do together: if it fails here, the ranks are no longer at one."""
        try:
            yield
        except Exception as exc:
            raise self.lose(f"rank 0 could not end a step: {exc!r}") from exc

    def close(self) -> None:
        """Send the other ranks home. Idempotent."""
        self._is_closed = True
        self.lose("the gang has been closed")

    def _minimum(self, value: int) -> int:
        answers = [value]
        for rank, channel in self._channels.items():
            message = channel.receive()
            if message is None or wire.kind_of(message) is not wire.Kind.MINIMUM:
                raise self.lose(f"rank {rank} ended at start: {_text(message)}")
            answers.append(wire.decode_minimum(message))
        self.send(wire.encode_minimum(min(answers)))
        return min(answers)

    def _watch(self) -> None:
        """Between steps and in them ranks say nothing: whatever comes means that one is lost."""
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                try:
                    selector.register(channel, selectors.EVENT_READ, rank)
                except ValueError:  # closed already
                    return
            (key, _), *_ = selector.select()
            message = self._channels[key.data].receive()
        self.lose(f"rank {key.data} ended: {_text(message)}")


def _text(message: bytes | bytearray | None) -> str:
    if message is None:
        return "its process is gone"
    return wire.decode_fault(message) if wire.kind_of(message) is wire.Kind.FAULT else "it spoke out of turn"


class LeaderRunner(ModelRunner):
    """The model runner of rank 0.

    Args:
        max_tables: Sequences whose block tables the ranks keep; at least those of one step.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        embeds: EmbedStore,
        decodes: DecodeReplay | None = None,
        mixed: MixedReplay | None = None,
        *,
        leader: Leader,
        max_tables: int,
    ) -> None:
        super().__init__(model, backend, embeds, decodes, mixed)
        self._leader = leader
        self._plans = wire.PlanEncoder(max_tables)

    def drop_embeddings(self, identities: Iterable[EmbeddingIdentity]) -> None:
        dropped = tuple(identities)
        super().drop_embeddings(dropped)
        self._leader.send(wire.encode_drop(dropped))

    def clear_embeddings(self) -> None:
        super().clear_embeddings()
        self._leader.send(wire.encode_clear())

    def put_embedding(self, identity: EmbeddingIdentity, embeddings: torch.Tensor) -> None:
        super().put_embedding(identity, embeddings)
        self._leader.send(wire.encode_put(identity, embeddings.shape[0]))
        rows = self._embeds.rows(identity, 0, embeddings.shape[0])
        with torch.inference_mode(), self._leader.in_step():
            self._leader.group.broadcast(rows)

    def run(self, plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        """See ModelRunner.

        Raises:
            ReplicaLostError: A rank is lost; the gang cannot go on.
        """
        self._leader.check()
        if plan.evicted_embeds:
            self.drop_embeddings(plan.evicted_embeds)
        if not plan.chunks:
            return super().run(plan)
        # A fault that is this step's alone must show before the ranks set out.
        for chunk in plan.chunks:
            for piece in chunk.embeds:
                self._rows(piece.identity, piece.item_start, piece.num_slots)
        has_pending = any(chunk.token_ids[-1] < 0 for chunk in plan.chunks)
        if has_pending and previous is None:
            raise InternalError("the step plan uses tokens of a step that drew none")
        sent = previous if has_pending else None
        self._leader.send(self._plans.encode(plan.chunks, 0 if sent is None else len(sent)))
        with torch.inference_mode(), self._leader.in_step():
            if sent is not None:  # drawn on this device, and not known to the host yet
                self._leader.group.broadcast(sent)
            return super().run(plan, previous)


class CheckedSampler(Sampler):
    """Believes no token of a step in which a rank was lost: its logits may be anything.

    Args:
        leader: Asked once tokens are on the host, which is when the device has ended the step.
    """

    def __init__(self, *, leader: Leader, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(seed=seed, device=device)
        self._leader = leader

    def draw(self, states: Sequence[SamplingState], logits: torch.Tensor) -> PendingSamples:
        pending = super().draw(states, logits)

        def read() -> list[Sample | SightlineError]:
            try:
                return pending.wait()
            finally:
                self._leader.check()  # a lost rank explains whatever the device says

        return PendingSamples(pending.tokens, read)
