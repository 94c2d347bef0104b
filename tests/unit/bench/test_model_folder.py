"""Model folders without weights: what they say, and that they can be served."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from app.model_card import read_model_card
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.tokenizer import eos_token_ids, load_tokenizer
from deployments.preprocessor.build import worst_case_item
from deployments.preprocessor.config import PreprocessorConfig
from deployments.vision_encoder.adapters.factory import read_normalisation, shape_of
from deployments.vision_encoder.config import EncoderConfig
from tests.bench.__main__ import main
from tests.bench.model_folder import SHAPES, SPECIAL_TOKENS, make_tokenizer, write
from tests.bench.pictures import photo_like_jpeg
from tests.bench.tokens.stack import open_stack


@pytest.mark.parametrize(
    ("shape", "layers", "hidden", "kv_heads", "vocabulary", "tied"),
    [("qwen2.5-vl-7b", 28, 3584, 4, 152_064, False), ("qwen2.5-vl-3b", 36, 2048, 2, 151_936, True)],
)
def test_published_shapes(
    tmp_path: Path, shape: str, layers: int, hidden: int, kv_heads: int, vocabulary: int, tied: bool
) -> None:
    assert main(["model-folder", shape, str(tmp_path / "m")]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "m")
    text = config.get_text_config()
    found = (text.num_hidden_layers, text.hidden_size, text.num_key_value_heads, text.vocab_size)
    assert found == (layers, hidden, kv_heads, vocabulary)
    assert config.tie_word_embeddings is tied
    assert text.hidden_size // text.num_attention_heads == 128
    assert (config.vision_config.depth, config.vision_config.out_hidden_size) == (32, hidden)
    assert (config.image_token_id, config.video_token_id) == (151_655, 151_656)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.token_to_id("<|image_pad|>") == config.image_token_id
    assert eos_token_ids(tmp_path / "m", tokenizer) == (151_643, 151_645)
    card = read_model_card(tmp_path / "m", "m")
    assert (card.max_model_len, card.vocab_size, card.dtype) == (128_000, vocabulary, "bfloat16")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert shape_of(raw) == shape_of(raw | {"vision_config": config.vision_config.to_dict()})
    assert read_normalisation(tmp_path / "m", raw)["image"].mean[0] == pytest.approx(0.48145466)
    assert worst_case_item(PreprocessorConfig(), tmp_path / "m") == (16_384, 65_536)


def test_a_token_a_byte_and_a_text_for_every_id() -> None:
    tokenizer = make_tokenizer(SHAPES["tiny"])
    text = "größer <b>\n東"
    assert len(tokenizer.encode(text).ids) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert all(tokenizer.decode([index]) for index in range(SHAPES["tiny"].first_special_id))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(480, 494))


async def test_the_tiny_one_is_served_with_dummy_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", SHAPES["tiny"])
    engine = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_bytes=1 << 22,
    )
    encoder = EncoderConfig(model=str(folder), load_format="dummy", device="cpu")
    url = f"data:image/jpeg;base64,{base64.b64encode(photo_like_jpeg(112, 84)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    async with open_stack(folder, engine, encoder) as stack:
        answer = await stack.answer(body)
        assert len(answer.token_ids) == 9
        assert await stack.answer(body) == answer


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["model-folder", "tiny", str(tmp_path / "file" / "m")]) == 2
    assert "error" in capsys.readouterr().err
