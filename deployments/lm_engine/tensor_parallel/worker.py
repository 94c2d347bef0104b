"""A rank other than 0: builds its share as rank 0 does and runs what it is told, until its channel ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from deployments.lm_engine.build import DeviceSide, build_device_side, pick_device
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import StepPlan
from deployments.lm_engine.tensor_parallel import wire
from deployments.lm_engine.tensor_parallel.channel import Address, Channel, connect
from deployments.lm_engine.tensor_parallel.group import COLLECTIVE_TIMEOUT_S, TensorParallelGroup, join_store

_LOG = logging.getLogger(__name__)


def run_rank(
    address: Address, rank: int, config: EngineConfig, folder: Path, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> None:
    """Be one rank of the model in `folder`: `serve_rank` with what the options say."""
    serve_rank(
        address, rank, config.tensor_parallel_size, pick_device(config.device),
        lambda group: build_device_side(config, folder, group), timeout_s,
    )  # fmt: skip


def serve_rank(
    address: Address,
    rank: int,
    size: int,
    device: torch.device,
    make_side: Callable[[TensorParallelGroup], DeviceSide],
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> None:
    """Join the gang and serve rank 0; returns once rank 0 is gone or has closed the gang.

    Args:
        make_side: Builds the share, as rank 0 builds its own at the same time.
        timeout_s: Of each collective.

    Raises:
        Exception: Whatever ended this rank; rank 0 has been told.
    """
    channel = connect(address, rank)
    group: TensorParallelGroup | None = None
    try:
        _expect(channel, wire.Kind.ALL_HERE)
        store = join_store(address.host, address.store_port)
        minimum = partial(_minimum, channel)
        group = TensorParallelGroup(store, rank, size, device, minimum=minimum, timeout_s=timeout_s)
        follow(channel, make_side(group), group)
    except Exception as exc:
        _LOG.exception("rank %d ends", rank)
        _tell(channel, exc)
        raise
    finally:
        channel.close()
        if group is not None:
            group.close()


def follow(channel: Channel, side: DeviceSide, group: TensorParallelGroup) -> None:
    """Do what rank 0 does, in its order, until the channel ends."""
    model = side.model
    runner = ModelRunner(model, side.backend, EmbedStore(), side.decodes, side.mixed)
    plans = wire.PlanDecoder()
    while (message := channel.receive()) is not None:
        match wire.kind_of(message):
            case wire.Kind.RUN:
                step, previous = plans.decode(message), None
                if step.num_previous:
                    previous = group.broadcast(torch.empty(step.num_previous, dtype=torch.int64, device=model.device))
                runner.run(StepPlan(step.chunks), previous)
            case wire.Kind.PUT_EMBEDDING:
                identity, num_slots = wire.decode_put(message)
                rows = torch.empty((num_slots, model.embed_width), dtype=model.dtype, device=model.device)
                runner.put_embedding(identity, group.broadcast(rows))
            case wire.Kind.DROP_EMBEDDINGS:
                runner.drop_embeddings(wire.decode_drop(message))
            case wire.Kind.CLEAR_EMBEDDINGS:
                runner.clear_embeddings()
            case kind:
                raise ValueError(f"rank 0 spoke out of turn: {kind.name}")


def _minimum(channel: Channel, value: int) -> int:
    channel.send(wire.encode_minimum(value))
    return wire.decode_minimum(_expect(channel, wire.Kind.MINIMUM))


def _expect(channel: Channel, kind: wire.Kind) -> bytearray:
    message = channel.receive()
    if message is None or wire.kind_of(message) is not kind:
        raise ConnectionError("rank 0 ended at start")
    return message


def _tell(channel: Channel, cause: Exception) -> None:
    try:
        channel.send(wire.encode_fault(repr(cause)))
    except OSError:
        _LOG.info("rank 0 is gone already")
