from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from deployments.preprocessor import config as config_module
from deployments.preprocessor.config import FetchConfig, PreprocessorConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_mm_per_prompt": {"audio": 1}}, "limit_mm_per_prompt.*audio.*image"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt.*-1"),
        ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.*fps.*min_pixels"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 8}}, "up to max_pixels"),
        ({"resample": "lanczos"}, "resample is 'lanczos'.*torch or pillow"),
        ({"decode_isolation": "vm"}, "decode_isolation.*vm"),
        ({"background": (1, 2, 256)}, "background.*256"),
        ({"max_image_pixels": 0}, "max_image_pixels is 0"),
        ({"decode_threads": -1}, "decode_threads is -1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PreprocessorConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_timeout_s": 0}, "total_timeout_s is 0"),
        ({"max_redirects": 11}, "max_redirects is 11"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"allowed_media_domains": ("http://x/",)}, "allowed_media_domains.*without scheme"),
        ({"internal_media_hosts": ("",)}, "internal_media_hosts"),
        ({"contact": "a\nb"}, "contact"),
    ],
)
def test_wrong_fetch_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FetchConfig(**options)


def test_every_field_is_followed_by_its_docstring() -> None:
    for node in ast.parse(inspect.getsource(config_module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for entry, following in zip(node.body, node.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and "ClassVar" not in ast.unparse(entry.annotation):
                assert isinstance(following, ast.Expr), ast.unparse(entry)
                assert isinstance(following.value, ast.Constant), ast.unparse(entry)
