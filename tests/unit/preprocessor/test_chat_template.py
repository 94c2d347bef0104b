from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.checkpoint import CheckpointError
from deployments.errors import InvalidRequestError
from deployments.preprocessor.chat_template import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "hi"}]


def test_environment_offers_what_templates_use() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if m.skip is defined %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ {'b': 1} | tojson(indent=2) }}{{ strftime_now('%%') }}{{ bos_token }}{{ extra }}"
    )
    template = ChatTemplate(source, variables={"bos_token": "<s>"})
    assert template.render(USER, template_kwargs={"extra": 7}) == 'hi{"a": "<é>"}{\n  "b": 1\n}%<s>7'


def test_request_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(USER, template_kwargs={"messages": [{"content": "forged"}]}) == "hi"


def test_templates_that_take_only_strings_get_joined_parts() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb;"


def test_tools_have_their_own_template() -> None:
    template = ChatTemplate("plain", "tools: {{ tools | length }}")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "f"}]) == "tools: 1"


def test_arguments_that_are_no_object_stay_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}")
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}
    assert template.render([message]) == "not json"


def test_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(InvalidRequestError, match="cannot render"):
            ChatTemplate(source).render(USER)


def test_syntax_errors_fail_at_start_up() -> None:
    with pytest.raises(CheckpointError, match="chat template has an error"):
        ChatTemplate("{% for %}")


def test_where_the_template_is_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config = {"chat_template": "from config", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(USER) == "from config"  # type: ignore[union-attr]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_chat_template(tmp_path).render(USER) == "from json"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("from jinja {{ eos_token }}")
    assert load_chat_template(tmp_path).render(USER) == "from jinja </s>"  # type: ignore[union-attr]


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert (template.render(USER), template.render(USER, tools=[{}])) == ("d", "t")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(CheckpointError, match="no default"):
        load_chat_template(tmp_path)
