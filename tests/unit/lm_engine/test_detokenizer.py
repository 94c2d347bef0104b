from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deployments.lm_engine.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from deployments.lm_engine.tokenizer import TokenDecoder, eos_token_ids, load_tokenizer
from tests.tiny_models import VOCAB_SIZE, make_tokenizer, save_tiny_model

BYTE_LEVEL = TokenDecoder(make_tokenizer().backend_tokenizer)
UNKNOWN_ID = VOCAB_SIZE + 1000


def sentencepiece_like() -> TokenDecoder:
    """A Metaspace tokenizer with byte fallback, as Llama 2's."""
    words = ["<unk>", "</s>", "▁a", "▁red", "▁cir", "cle", "s", ".", "▁"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return TokenDecoder(tokenizer)


METASPACE = sentencepiece_like()


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), st.booleans())
def test_any_tokens_join_to_the_whole_text(ids: list[int], skip: bool) -> None:
    joined = "".join(pieces(ByteLevelDetokenizer(BYTE_LEVEL, skip_special_tokens=skip), ids))
    assert joined == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(text: str) -> None:
    ids = encode(text)
    for decoder, kind in ((BYTE_LEVEL, ByteLevelDetokenizer), (BYTE_LEVEL, WindowDetokenizer)):
        shown = ""
        for piece in pieces(kind(decoder, skip_special_tokens=False), ids):
            shown += piece
            assert text.startswith(shown), "a piece was shown that the text does not begin with"
        assert shown == text


def id_of(token: str) -> int:
    token_id = BYTE_LEVEL._tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def encode(text: str) -> list[int]:
    return BYTE_LEVEL._tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(range(2, 9)), max_size=20))
def test_leading_spaces_of_other_tokenizers_come_out_right(ids: list[int]) -> None:
    detokenizer = make_detokenizer(METASPACE, skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(pieces(detokenizer, ids)) == METASPACE.decode(ids, skip_special_tokens=True)


def test_byte_fallback_waits_for_the_whole_character() -> None:
    ids = [9 + byte for byte in "🙂é".encode()]
    shown = pieces(make_detokenizer(METASPACE, skip_special_tokens=True), [2, *ids])
    assert "".join(shown) == "a🙂é"
    assert not any("\ufffd" in piece for piece in shown)


def test_special_tokens_are_skipped_or_shown() -> None:
    end = id_of("<|im_end|>")
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL, skip_special_tokens=True), [end])) == ""
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL, skip_special_tokens=False), [end])) == "<|im_end|>"


def test_broken_bytes_are_not_held_for_ever() -> None:
    tail = id_of("\u0122")  # byte 0x80: continues a character that never began
    shown = pieces(WindowDetokenizer(BYTE_LEVEL, skip_special_tokens=True), [tail] * 12)
    assert any(shown[:-1])
    assert "".join(shown) == "\ufffd" * 12


def test_ids_the_tokenizer_lacks_are_nothing() -> None:
    assert "".join(pieces(make_detokenizer(BYTE_LEVEL, skip_special_tokens=True), [UNKNOWN_ID])) == ""


@pytest.mark.parametrize("token_id", range(0, VOCAB_SIZE, 7))
def test_a_tokens_bytes(token_id: int) -> None:
    text = BYTE_LEVEL.decode([token_id], skip_special_tokens=False)
    assert BYTE_LEVEL.bytes_of(token_id).decode(errors="replace") == text


def test_end_of_text_ids_come_from_all_configs(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    assert eos_token_ids(folder, tokenizer) == (0, 2)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder, tokenizer) == (2,)
