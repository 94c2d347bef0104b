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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoder_placement": "colocated"}, r"is 'nixl', but encoder_placement is 'colocated'"),
        (
            {"embedding_transfer": "cuda_ipc", "lm_engine": {"device": "cpu"}},
            r"is 'cuda_ipc', but lm_engine\.device is 'cpu'",
        ),
        (
            {"embedding_transfer": "cuda_ipc", "vision_encoder": {"data_parallel_size": 2}},
            r"is 'cuda_ipc', but vision_encoder\.data_parallel_size is 2; allowed: 1",
        ),
        ({"embedding_transfer": "carrier_pigeon"}, r"carrier_pigeon.*object_store.*nixl.*cuda_ipc|Input should be"),
    ],
    ids=["colocated", "cpu", "data_parallel", "unknown"],
)
def test_a_transfer_that_cannot_work_is_refused_before_any_replica_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"embedding_transfer.*({said})"):
        build({"model": str(MODEL), "embedding_transfer": "nixl", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hedging": {"max_share": 2}}, r"lm_engine\.hedging: hedging\.max_share is 2"),
        ({"hedging": {"patience": 2}}, r"lm_engine\.hedging\.patience"),
        ({"embed_pool_bytes": -1}, r"lm_engine: embed_pool_bytes must be at least 0; it is -1"),
    ],
    ids=["share", "unknown", "pool"],
)
def test_wrong_options_of_the_engine_s_transfer_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(lm_engine=options)
