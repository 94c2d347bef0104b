"""From pydantic's findings to one InvalidRequestError in our own words, with the path as an API user writes it.

Nothing of the library's text or of the caller's payload gets into a message: numbers and short words at most.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.openai_schema import PART_TYPES, ROLES
from deployments.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)

_TAGS = frozenset((*PART_TYPES, *ROLES))
_FORMAT_TAGS = frozenset(("text", "json_object", "json_schema"))
_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_SHORT_WORD = re.compile(r"[A-Za-z0-9_.\-]{1,32}")


def validate(model: type[M], data: Mapping[str, Any]) -> M:
    """Raises InvalidRequestError about the first thing that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _translate(error, model, data) from None
    except RecursionError:
        raise InvalidRequestError("The request is nested too deeply.", code="json_too_complex") from None


def _translate(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> InvalidRequestError:
    finding: Any = error.errors(include_url=False)[0]
    kind, context = finding["type"], finding.get("ctx") or {}
    param = param_path(finding["loc"])
    if kind == "sightline":
        blamed = context.get("param") or _blamed(context["message"], finding["loc"], param)
        return InvalidRequestError(context["message"], code=context["code"], param=blamed)
    if kind == "missing":
        return InvalidRequestError(f"{param} is missing.", code="missing_required_parameter", param=param)
    if kind == "extra_forbidden":
        return _unknown_field(param, finding["loc"], model)
    if kind == "union_tag_not_found":
        tag = _tag_name(finding["loc"])
        return InvalidRequestError(
            f"{param}.{tag} is missing.", code="missing_required_parameter", param=f"{param}.{tag}"
        )
    if kind == "union_tag_invalid":
        tag = _tag_name(finding["loc"])
        return InvalidRequestError(
            f"{param}.{tag} is {_show(context.get('tag'))}; allowed: {_allowed_tags(tag, finding['loc'])}.",
            param=f"{param}.{tag}",
        )
    if kind in _TYPES:
        return InvalidRequestError(f"{param} must be {_TYPES[kind]}.", code="invalid_type", param=param)
    return InvalidRequestError(f"{param} {_say(kind, context, finding.get('input'))}", param=param)


def _say(kind: str, context: Mapping[str, Any], value: object) -> str:
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"is {_show(value)}; it must be {words} {context[key]:g}."
    if kind == "literal_error":
        return f"is {_show(value)}; allowed: {context.get('expected', 'other values')}."
    if kind == "string_too_short":
        return f"must have at least {context['min_length']} characters."
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters."
    if kind == "too_short":
        return f"must have at least {context['min_length']} entries."
    if kind == "too_long":
        return f"must have at most {context['max_length']} entries."
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    return "is not valid."


def _blamed(message: str, loc: Sequence[int | str], param: str) -> str | None:
    """`_drop_nulls` knows a refused option only from inside the object that holds it: its name opens the message."""
    name = message.partition(" is not supported")[0] if " is not supported" in message else ""
    if re.fullmatch(r"[a-z_]+", name) and (not loc or loc[-1] != name):
        return f"{param}.{name}" if param else name
    return param or None


def _unknown_field(param: str, loc: Sequence[int | str], model: type[BaseModel]) -> InvalidRequestError:
    hint = ""
    if len(loc) == 1:
        close = difflib.get_close_matches(str(loc[0])[:64], list(model.model_fields), n=1, cutoff=0.8)
        hint = f" Did you mean {close[0]}?" if close else ""
    return InvalidRequestError(f"Unknown field: {param}.{hint}", code="unknown_parameter", param=param)


def _tag_name(loc: Sequence[int | str]) -> str:
    return "role" if len(loc) == 2 and loc[0] == "messages" else "type"


def _allowed_tags(tag: str, loc: Sequence[int | str]) -> str:
    if tag == "role":
        return ", ".join(ROLES)
    if loc[0] == "response_format":
        return "text, json_object, json_schema"
    return "text, image_url, video_url"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:.17g}" if isinstance(value, float) else (str(value) if abs(value) < 10**20 else "too large")
    if isinstance(value, str) and _SHORT_WORD.fullmatch(value):
        return repr(value)
    return "something else"


def param_path(loc: Sequence[int | str]) -> str:
    """`("messages", 0, "user", "content", 1, "image_url", "image_url")` as `messages[0].content[1].image_url`.

    Pydantic puts the tag of a union's member behind the place of the union; an API user knows nothing of it.
    """
    path = ""
    previous: int | str | None = None
    for entry in loc:
        is_member = isinstance(previous, int) and entry in _TAGS
        is_format = previous == "response_format" and entry in _FORMAT_TAGS
        if isinstance(entry, int):
            path += f"[{entry}]"
        elif not (is_member or is_format or "[" in entry):
            safe = entry if _SHORT_WORD.fullmatch(entry) else "?"
            path = f"{path}.{safe}" if path else safe
        previous = entry if not (is_member or is_format) else None
    return path
