"""What rank 0 tells the others, as bytes: the chunks of a step, which embeddings come and go. No pickle, no tensors.

    plan    header, [chunks, 7] rows, new block ids, token ids, positions, [embeds, 4] rows     int32
            identities of the embeds                                                           bytes

A sequence's block table grows by a block every so many steps and is long: only what is new of it is sent. Each table
has a number, under which the other side keeps what it knows:

    scheduler's table   7 3 9 4          row: table 5, known 3, new 1     sent: 4
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np

from cache_service.identity import EmbeddingIdentity
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk

_INT32 = np.dtype(np.int32)
_CHUNK_COLUMNS, _EMBED_COLUMNS = 7, 4


class Kind(IntEnum):
    """First int32 of every message."""

    ALL_HERE = 1
    RUN = 2
    PUT_EMBEDDING = 3
    DROP_EMBEDDINGS = 4
    CLEAR_EMBEDDINGS = 5
    MINIMUM = 6
    FAULT = 7


def kind_of(message: bytes | bytearray) -> Kind:
    return Kind(int(np.frombuffer(message, _INT32, 1)[0]))


@dataclass(slots=True)
class _Table:
    number: int
    block_ids: list[int]


class PlanEncoder:
    """Args:
    max_tables: Block tables that both sides keep; above it the one not used for longest is sent whole again.
    """

    def __init__(self, max_tables: int) -> None:
        if max_tables < 1:
            raise ValueError(f"max_tables must be at least 1; it is {max_tables}")
        self._max_tables = max_tables
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    def encode(self, chunks: Sequence[SequenceChunk], num_previous: int = 0) -> bytes:
        """Chunks of one step, at least one. Messages must be decoded in the order they are made.

        Args:
            num_previous: Tokens of the step before that follow, as a broadcast; 0 if no chunk has pending ones.
        """
        rows, blocks, tokens, embeds = array("i"), array("i"), array("i"), array("i")
        identities: list[bytes] = []
        for chunk in chunks:
            number, known = self._known(chunk)
            rows.extend(
                (number, known, len(chunk.block_ids) - known, chunk.start, chunk.num_tokens, chunk.samples,
                 len(chunk.embeds))
            )  # fmt: skip
            blocks.extend(chunk.block_ids[known:])
            tokens.extend(chunk.token_ids)
            for piece in chunk.embeds:
                embeds.extend((piece.chunk_start, piece.item_start, piece.num_slots, len(piece.identity)))
                identities.append(piece.identity)
        positions = np.concatenate([chunk.positions for chunk in chunks], axis=1, dtype=np.int32)
        header = array(
            "i", (Kind.RUN, num_previous, len(chunks), len(blocks), len(tokens), len(positions), len(identities))
        )
        return b"".join((header, rows, blocks, tokens, positions.tobytes(), embeds, *identities))

    def _known(self, chunk: SequenceChunk) -> tuple[int, int]:
        """The number of the chunk's table, and how many of its blocks the other side knows."""
        table = self._tables.get(chunk.sequence_id)
        if table is None:
            if len(self._tables) < self._max_tables:
                table = _Table(len(self._tables), [])
            else:
                _, table = self._tables.popitem(last=False)
                table.block_ids = []
            self._tables[chunk.sequence_id] = table
        else:
            self._tables.move_to_end(chunk.sequence_id)
        known = len(table.block_ids)
        # A sequence that was preempted, or another one of the same name, has other blocks.
        if chunk.block_ids[:known] != table.block_ids:
            known = 0
        if known < len(chunk.block_ids) or not known:
            table.block_ids = list(chunk.block_ids)
        return table.number, known


@dataclass(frozen=True, slots=True)
class Run:
    chunks: tuple[SequenceChunk, ...]
    num_previous: int


class PlanDecoder:
    """The other side of `PlanEncoder`."""

    def __init__(self) -> None:
        self._tables: dict[int, np.ndarray] = {}

    def decode(self, message: bytes | bytearray) -> Run:
        """Chunks under sequence ids of their own; arrays in the place of lists, valid until the next call."""
        reader = _Reader(message)
        _, num_previous, num_chunks, num_blocks, num_tokens, axes, num_embeds = reader.take(7).tolist()
        rows = reader.take(num_chunks * _CHUNK_COLUMNS).reshape(-1, _CHUNK_COLUMNS).tolist()
        blocks, tokens = reader.take(num_blocks), reader.take(num_tokens)
        positions = reader.take(axes * num_tokens).reshape(axes, num_tokens)
        pieces = iter(reader.embeds(num_embeds))
        chunks, block, token = [], 0, 0
        for number, known, new, start, count, samples, embeds in rows:
            table = self._grown(number, known, blocks[block : block + new])
            chunks.append(
                SequenceChunk(
                    sequence_id=str(number),
                    start=start,
                    token_ids=tokens[token : token + count],  # type: ignore[arg-type]
                    positions=positions[:, token : token + count],
                    block_ids=table,  # type: ignore[arg-type]
                    samples=bool(samples),
                    embeds=tuple(islice(pieces, embeds)) if embeds else (),
                )
            )
            block, token = block + new, token + count
        return Run(tuple(chunks), num_previous)

    def _grown(self, number: int, known: int, new: np.ndarray) -> np.ndarray:
        if not known:
            self._tables[number] = new
        elif new.size:
            self._tables[number] = np.concatenate((self._tables[number], new))
        return self._tables[number]


class _Reader:
    def __init__(self, message: bytes | bytearray) -> None:
        self._message, self._at = message, 0

    def take(self, count: int) -> np.ndarray:
        values = np.frombuffer(self._message, _INT32, count, self._at)
        self._at += values.nbytes
        return values

    def bytes(self, count: int) -> bytes:
        self._at += count
        return bytes(self._message[self._at - count : self._at])

    def embeds(self, count: int) -> list[EmbedSlice]:
        rows = self.take(count * _EMBED_COLUMNS).reshape(-1, _EMBED_COLUMNS).tolist()
        return [
            EmbedSlice(EmbeddingIdentity(self.bytes(length)), chunk_start, item_start, num_slots)
            for chunk_start, item_start, num_slots, length in rows
        ]


def encode_all_here() -> bytes:
    """Every rank has joined: collectives may begin."""
    return array("i", (Kind.ALL_HERE,)).tobytes()


def encode_put(identity: EmbeddingIdentity, num_slots: int) -> bytes:
    """An embedding of so many rows follows, as a broadcast."""
    return b"".join((array("i", (Kind.PUT_EMBEDDING, num_slots)), identity))


def decode_put(message: bytes | bytearray) -> tuple[EmbeddingIdentity, int]:
    return EmbeddingIdentity(bytes(message[8:])), int(np.frombuffer(message, _INT32, 2)[1])


def encode_drop(identities: Iterable[EmbeddingIdentity]) -> bytes:
    known = tuple(identities)
    header = array("i", (Kind.DROP_EMBEDDINGS, len(known), *map(len, known)))
    return b"".join((header, *known))


def decode_drop(message: bytes | bytearray) -> tuple[EmbeddingIdentity, ...]:
    reader = _Reader(message)
    _, count = reader.take(2).tolist()
    return tuple(EmbeddingIdentity(reader.bytes(length)) for length in reader.take(count).tolist())


def encode_clear() -> bytes:
    return array("i", (Kind.CLEAR_EMBEDDINGS,)).tobytes()


def encode_minimum(value: int) -> bytes:
    """A rank's value, or the least of all ranks' in answer."""
    return b"".join((array("i", (Kind.MINIMUM,)), value.to_bytes(8, "little", signed=True)))


def decode_minimum(message: bytes | bytearray) -> int:
    return int.from_bytes(message[4:], "little", signed=True)


def encode_fault(text: str) -> bytes:
    """Why a rank ends."""
    return b"".join((array("i", (Kind.FAULT,)), text.encode()))


def decode_fault(message: bytes | bytearray) -> str:
    return message[4:].decode()
