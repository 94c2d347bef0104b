"""Start-up arguments: what is merged, and what a wrong one says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest

import app.config
from app.config import SECTIONS, AppConfig, ConfigError


def test_shared_options_flow_into_every_section_that_has_them() -> None:
    config = AppConfig.parse({"model": "m", "dtype": "bfloat16", "lm_engine": {"max_num_seqs": 4}})
    assert config.lm_engine.model == config.vision_encoder.model == "m"
    assert config.lm_engine.dtype == config.vision_encoder.dtype == "bfloat16"
    assert config.lm_engine.max_num_seqs == 4


def test_a_section_may_override_a_shared_option() -> None:
    config = AppConfig.parse({"model": "m", "dtype": "bfloat16", "vision_encoder": {"dtype": "float32"}})
    assert (config.lm_engine.dtype, config.vision_encoder.dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, ["model", "missing"]),
        ({"model": "m", "modle": 1}, ["modle", "1", "allowed", "served_model_name", "did you mean model"]),
        ({"model": "m", "lm_engine": {"max_num_seq": 4}}, ["lm_engine.max_num_seq", "4", "did you mean max_num_seqs"]),
        ({"model": "m", "lm_engine": {"max_num_seqs": 0}}, ["lm_engine", "max_num_seqs", "0", "at least 1"]),
        ({"model": "m", "lm_engine": {"dtype": "int4"}}, ["lm_engine.dtype", "int4", "bfloat16"]),
        ({"model": "m", "lm_engine": {"block_size": "many"}}, ["lm_engine.block_size", "many"]),
        ({"model": "m", "vision_encoder": 3}, ["vision_encoder", "3"]),
        ({"model": "m", "encoder_placement": "moon"}, ["encoder_placement", "moon", "colocated"]),
        ({"model": "m", "server": {"limits": {"max_n": 0}}}, ["server.limits", "max_n", "0"]),
        ({"model": "m", "preprocessor": {"fetch": {"max_redirect": 3}}}, ["preprocessor.fetch.max_redirect", "3"]),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(args: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    for word in said:
        assert word in str(caught.value)


def test_a_missing_shared_option_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse({})
    assert len(str(caught.value).splitlines()) == 1


def test_a_password_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse({"model": "m", "cache": {"redis": {"url": "http://user:hunter2@host"}}})
    assert "hunter2" not in str(caught.value)


def test_the_redis_url_may_come_from_the_environment() -> None:
    config = AppConfig.parse({"model": "m"})
    assert config.cache.resolve({}) is None
    redis = config.cache.resolve({"SIGHTLINE_REDIS_URL": "redis://127.0.0.1:6379/0"})
    assert redis is not None
    assert redis.url == "redis://127.0.0.1:6379/0"


def _documented(kind: type) -> set[str]:
    """Names of the class's fields that are followed by a docstring."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        node.target.id
        for node, after in pairs
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


@pytest.mark.parametrize("kind", [*SECTIONS.values(), app.config.RedisTierConfig, app.config.EdgeLimits])
def test_every_option_is_documented_and_extra_ones_are_refused(kind: Any) -> None:
    assert {option.name for option in dataclasses.fields(kind)} <= _documented(kind)
    assert kind.__pydantic_config__ == {"extra": "forbid"}
