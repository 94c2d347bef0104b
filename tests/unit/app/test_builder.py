"""What the composition root decides before any replica starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.builder import build, encoder_fingerprint
from app.config import AppConfig, ConfigError
from cache_service.identity import ItemIdentity, embedding_identity

MODEL = Path(__file__).parents[3] / "serve_configs" / "demo_model"


def parse(**options: Any) -> AppConfig:
    return AppConfig.parse({"model": str(MODEL), "dtype": "bfloat16", **options})


def test_an_encoder_in_eight_bits_has_keys_of_its_own() -> None:
    item = ItemIdentity(bytes(32))
    plain, quantized, engine_only = (
        embedding_identity(item, encoder_fingerprint(parse(**options), MODEL))
        for options in (
            {},
            {"vision_encoder": {"quantization": "fp8"}},
            {"lm_engine": {"quantization": "fp8"}},
        )
    )
    assert plain != quantized
    assert plain == engine_only


@pytest.mark.parametrize("section", ["vision_encoder", "lm_engine"])
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "float16"}, {"dtype": "bfloat16", "device": "cpu"}], ids=str
)
def test_eight_bits_where_they_cannot_be_are_refused_before_any_replica_starts(
    section: str, options: dict[str, str]
) -> None:
    args = {"model": str(MODEL), section: {"quantization": "fp8", **options}}
    with pytest.raises(ConfigError, match=rf"{section}\.quantization is 'fp8'.*'{options['dtype']}'"):
        build(args)


@pytest.mark.parametrize("section", ["vision_encoder", "lm_engine"])
def test_an_unknown_format_is_refused_by_the_options_name(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.quantization.*int3"):
        parse(**{section: {"quantization": "int3"}})
