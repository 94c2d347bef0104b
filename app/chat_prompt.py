"""From the turns of a chat request to a template-ready prompt and its media, in prompt order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from app.checks import at_most
from app.limits import EdgeLimits
from app.openai_schema import (
    AnyMessage,
    AssistantMessage,
    ChatTemplateOptions,
    ContentPart,
    ImagePart,
    ImageUrlPart,
    RefusalPart,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    VideoPart,
    VideoUrlPart,
)
from cache_service.tenants import Tenant
from deployments.errors import InvalidRequestError
from deployments.messages import ChatPrompt, MediaInput

_RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    )
)


@dataclass(frozen=True, slots=True)
class _Content:
    template: str | list[dict[str, str]]
    """Text, or the parts with media as bare `{"type": "image"}`."""
    media: list[MediaInput]


class ChatPromptBuilder:
    """One per ingress replica."""

    def __init__(self, limits: EdgeLimits) -> None:
        self._limits = limits

    def build(
        self, request: ChatTemplateOptions, tenant: Tenant, *, with_tools: bool
    ) -> tuple[ChatPrompt, tuple[MediaInput, ...]]:
        """Raises InvalidRequestError naming the turn or part at fault."""
        at_most("messages", len(request.messages), self._limits.max_messages, "messages")
        num_parts = sum(len(message.content or ()) for message in request.messages)
        at_most("messages", num_parts, self._limits.max_content_parts, "content parts")
        reserved = sorted(_RESERVED_TEMPLATE_KWARGS.intersection(request.chat_template_kwargs))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {reserved[0]}.", param=f"chat_template_kwargs.{reserved[0]}"
            )
        messages: list[Mapping[str, Any]] = []
        media: list[MediaInput] = []
        for i, message in enumerate(request.messages):
            content = self._content(message, f"messages[{i}]")
            media.extend(content.media)
            messages.append(_template_message(message, content.template, f"messages[{i}]"))
        self._check_media_counts(media, tenant)
        tools = tuple(_template_tool(tool) for tool in request.tools) if with_tools else None
        prompt = ChatPrompt(
            messages=tuple(messages),
            tools=tools,
            template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        return prompt, tuple(media)

    def _content(self, message: AnyMessage, path: str) -> _Content:
        parts: list[dict[str, str]] = []
        media: list[MediaInput] = []
        for i, part in enumerate(message.content or ()):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            elif isinstance(part, RefusalPart):
                parts.append({"type": "text", "text": part.refusal})
            else:
                item = self._media(part, f"{path}.content[{i}]")
                media.append(item)
                parts.append({"type": item.modality})
        if media:
            return _Content(parts, media)
        # As one string: templates that know no parts read it too, and those that do would join the parts alike.
        return _Content("".join(part["text"] for part in parts), media)

    def _media(self, part: ContentPart, path: str) -> MediaInput:
        if isinstance(part, ImageUrlPart):
            url = part.image_url.url if part.image_url else None
            detail = part.image_url.detail if part.image_url else "auto"
            return self._media_input("image", f"{path}.image_url", "url", url, part.uuid, detail=detail)
        if isinstance(part, VideoUrlPart):
            url = part.video_url.url if part.video_url else None
            return self._media_input("video", f"{path}.video_url", "url", url, part.uuid)
        if isinstance(part, ImagePart):
            return self._media_input("image", f"{path}.image", "", part.image, part.uuid)
        assert isinstance(part, VideoPart)
        if isinstance(part.video, list):
            at_most(f"{path}.video", len(part.video), self._limits.max_video_frames, "frames")
            if not all(part.video):
                raise InvalidRequestError("A frame's URL is empty.", param=f"{path}.video")
            return self._media_input("video", f"{path}.video", "", None, part.uuid, frames=tuple(part.video))
        return self._media_input("video", f"{path}.video", "", part.video, part.uuid)

    def _media_input(
        self,
        modality: Literal["image", "video"],
        param: str,
        field: str,
        url: str | None,
        uuid: str | None,
        *,
        detail: Literal["auto", "low", "high"] = "auto",
        frames: tuple[str, ...] = (),
    ) -> MediaInput:
        place = f"{param}.{field}" if field else param
        if url is None and not frames and uuid is None:
            raise InvalidRequestError(
                f"{place} is missing: a data: or http(s) URL is needed, or a uuid that is known already.",
                code="missing_required_parameter",
                param=param,
            )
        if url is not None and not url.strip():
            raise InvalidRequestError(f"{place} is empty: a data: or http(s) URL is needed.", param=param)
        if uuid is not None and len(uuid) > self._limits.max_uuid_chars:
            raise InvalidRequestError(
                f"The uuid has {len(uuid)} characters, the limit is {self._limits.max_uuid_chars}.",
                param=f"{param.rpartition('.')[0]}.uuid",
            )
        return MediaInput(modality=modality, param=param, url=url, uuid=uuid, detail=detail, frames=frames)

    def _check_media_counts(self, media: Sequence[MediaInput], tenant: Tenant) -> None:
        for modality, words in (("image", "images"), ("video", "videos")):
            limit = self._limits.limit_mm_per_prompt.get(modality, 0)
            _check_count([item for item in media if item.modality == modality], words, limit, "the limit")
        if tenant.limits.max_images_per_request is not None:
            _check_count(media, "images and videos", tenant.limits.max_images_per_request, "the limit of this key")


def _template_message(message: AnyMessage, content: str | list[dict[str, str]], path: str) -> dict[str, Any]:
    # Templates know no developer; OpenAI's own rule is that it takes the system message's place.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None and message.refusal is not None:
            turn["content"] = message.refusal
        if message.reasoning_content is not None:
            turn["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            turn["tool_calls"] = [
                _template_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
            ]
    return turn


def _template_call(call: ToolCall, path: str) -> dict[str, Any]:
    """Arguments as an object: templates write them as JSON, and a string would be quoted twice."""
    param = f"{path}.function.arguments"
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except ValueError:
        raise InvalidRequestError(f"{param} is not valid JSON.", code="invalid_json", param=param) from None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be the JSON text of an object.", param=param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.function.name,
        "description": tool.function.description,
        "parameters": tool.function.parameters,
    }
    return {"type": "function", "function": function}


def check_mm_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Flat and small; which names exist is for the preprocessor to say."""
    for name, value in kwargs.items():
        safe = name if name.isidentifier() and len(name) <= 64 else "?"
        scalars = value if isinstance(value, list) and len(value) <= 16 else [value]
        if not all(isinstance(v, int | float | str | bool) for v in scalars) or len(str(value)) > 256:
            raise InvalidRequestError(
                f"mm_processor_kwargs.{safe} must be a number, a short text or a short list of them.",
                param=f"mm_processor_kwargs.{safe}",
            )
    return kwargs


def _check_count(media: Sequence[MediaInput], words: str, limit: int, whose: str) -> None:
    if len(media) > limit:
        raise InvalidRequestError(
            f"The request has {len(media)} {words}, {whose} is {limit}.",
            code="too_many_media",
            param=media[limit].param,
        )
