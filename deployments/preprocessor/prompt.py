"""Prompt -> token ids with one placeholder per item, then with one placeholder per slot.

ChatPrompt ──template──▶ text ──tokenizer──▶ ids with one placeholder id per item      (before media are known)
ids + spans per item ──expand──▶ final ids and where each span begins                  (once sizes are known)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.checkpoint import CheckpointError
from deployments.errors import ContextLengthError, InvalidRequestError
from deployments.messages import ChatPrompt, Modality, TextPrompt
from deployments.preprocessor.chat_template import ChatTemplate, load_chat_template
from deployments.preprocessor.families.base import Family, Span
from deployments.preprocessor.tokenizer import AliasedTokenizer

_MODALITIES: tuple[Modality, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    """First position of each span, by the item of the request, in prompt order."""


class PromptBuilder:
    """Turns prompts into token ids. Pure after construction and safe to share among threads.

    Args:
        tokenizer: Knows special tokens by alias only.
        template: None for models without one; chat prompts are then refused.
        family: Says which token stands for which modality.
    """

    def __init__(self, tokenizer: AliasedTokenizer, template: ChatTemplate | None, family: Family) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._placeholders = {family.placeholder_id(modality): modality for modality in _MODALITIES}
        self._placeholder_names = {
            name for name, token_id in tokenizer.special_ids.items() if token_id in self._placeholders
        }
        self._vocab_size = tokenizer.vocab_size
        if missing := set(self._placeholders) - set(tokenizer.special_ids.values()):
            raise CheckpointError(f"the tokenizer has no special tokens with the placeholder ids {sorted(missing)}")

    @classmethod
    def from_folder(cls, folder: Path, family: Family) -> PromptBuilder:
        tokenizer = AliasedTokenizer.from_folder(folder)
        return cls(tokenizer, load_chat_template(folder, tokenizer.alias), family)

    def encode(
        self, prompt: ChatPrompt | TextPrompt, modalities: Sequence[Modality], max_tokens: int | None = None
    ) -> list[int]:
        """Token ids with exactly one placeholder per item, in the order of `modalities`.

        Raises:
            ContextLengthError: The text is so long that it cannot but have more than `max_tokens`; a shorter one may
                still have, which is the caller's to check.
            InvalidRequestError: The template refuses the conversation or has no place for an item.
        """
        if isinstance(prompt, TextPrompt):
            token_ids = self._encode_text(prompt, max_tokens)
        else:
            token_ids = self._encode_chat(prompt, max_tokens)
        found = [self._placeholders[token_id] for token_id in token_ids if token_id in self._placeholders]
        if found != list(modalities):
            raise InvalidRequestError(
                f"the prompt has {len(modalities)} pictures or videos, but the model's chat template has places for "
                f"{len(found)} of them; put them into user messages",
                param="messages",
            )
        return token_ids

    def _encode_chat(self, prompt: ChatPrompt, max_tokens: int | None) -> list[int]:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        if not prompt.messages:
            raise InvalidRequestError("at least one message is needed", param="messages")
        text = self._continued(prompt) if prompt.continue_final_message else self._rendered(prompt, prompt.messages)
        self._check_length(text, max_tokens, "messages")
        return self._tokenizer.encode(text)

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        """Encoding a few megabytes takes seconds; what is hopeless is refused before."""
        at_least = self._tokenizer.min_tokens(text)
        if max_tokens is not None and at_least > max_tokens:
            raise ContextLengthError(
                f"the prompt has at least {at_least} tokens; at most {max_tokens} fit the model's context", param=param
            )

    def _rendered(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self._template is not None
        return self._template.render(
            messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
            template_kwargs=prompt.template_kwargs,
        )

    def _continued(self, prompt: ChatPrompt) -> str:
        """The rendered prompt up to the end of the last message's text, so that the model goes on writing it."""
        *before, last = prompt.messages
        mark = self._tokenizer.end_mark
        text = self._rendered(prompt, [*before, _append_text(last, mark)])
        end = text.rfind(mark)
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message needs a last message whose text the chat template shows at its end",
                param="continue_final_message",
            )
        return text[:end]

    def _encode_text(self, prompt: TextPrompt, max_tokens: int | None) -> list[int]:
        """A raw prompt: its special tokens count, except for placeholders, which stay text."""
        if prompt.text is not None:
            text = self._tokenizer.alias(prompt.text, keep=self._placeholder_names)
            self._check_length(text, max_tokens, "prompt")
            return self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
        token_ids = list(prompt.token_ids or ())
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside the vocabulary (0 to {self._vocab_size - 1})",
                    param=f"prompt[{position}]",
                )
            if token_id in self._placeholders:
                raise InvalidRequestError(
                    f"token id {token_id} stands for a picture or video and cannot be given as a number",
                    param=f"prompt[{position}]",
                )
        return token_ids

    def expand(self, token_ids: Sequence[int], items: Sequence[Sequence[Span]]) -> ExpandedPrompt:
        """Put the spans of the n-th item in the place of the n-th placeholder."""
        expanded: list[int] = []
        offsets: list[tuple[int, ...]] = []
        for token_id in token_ids:
            if token_id not in self._placeholders:
                expanded.append(token_id)
                continue
            starts = []
            for span in items[len(offsets)]:
                expanded += self._encode_fixed(span.before)
                starts.append(len(expanded))
                expanded += [token_id] * span.num_slots
                expanded += self._encode_fixed(span.after)
            offsets.append(tuple(starts))
        assert len(offsets) == len(items), "as many placeholders as items"
        return ExpandedPrompt(tuple(expanded), tuple(offsets))

    def _encode_fixed(self, text: str) -> list[int]:
        """Text of the family's own; encoding it apart is right where special tokens stand around it."""
        return self._tokenizer.encode(self._tokenizer.alias(text)) if text else []


def _append_text(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    parts = [dict(part) for part in content or ()]
    if not parts or parts[-1].get("type") != "text":
        raise InvalidRequestError(
            "continue_final_message needs a last message that ends with text", param="continue_final_message"
        )
    parts[-1]["text"] += mark
    return {**message, "content": parts}
