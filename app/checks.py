"""Checks of counts and values against the operator's limits."""

from __future__ import annotations

from deployments.errors import InvalidRequestError


def at_most(param: str, count: int, limit: int, words: str) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"{param} has {count} {words}, the limit is {limit}.", code="limit_exceeded", param=param
        )


def value_at_most(param: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{param} is {value}, the limit is {limit}.", code="limit_exceeded", param=param)
