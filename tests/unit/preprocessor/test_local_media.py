from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError, UrlNotAllowedError
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.local_media import LocalMedia, is_file_url

DATA = b"the picture's bytes"
LIMIT = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(DATA)
    (folder / "inner" / "ä b%.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "a.png").write_bytes(b"secret")
    return folder


@pytest.mark.parametrize("form", ["file://{}/a.png", "FILE://localhost{}/a.png", " file://{}/.//a.png"])
def test_file_below_the_folder(root: Path, form: str) -> None:
    media = LocalMedia(str(root))
    media.check(form.format(root))
    assert media.read(form.format(root), LIMIT) == DATA


def test_percent_encoding_and_inner_folders(root: Path) -> None:
    assert LocalMedia(str(root)).read(f"file://{quote(f'{root}/inner/ä b%.png')}", LIMIT) == DATA


def test_links_inside_lead_on_and_links_outside_do_not(root: Path) -> None:
    (root / "inside.png").symlink_to("inner/ä b%.png")
    (root / "outside.png").symlink_to(root.parent / "secret.png")
    (root / "folder").symlink_to(root.parent / "media-too")
    (root / "loop.png").symlink_to("loop.png")
    media = LocalMedia(str(root))
    assert media.read(f"file://{root}/inside.png", LIMIT) == DATA
    for name in ("outside.png", "folder/a.png", "loop.png"):
        with pytest.raises(UrlNotAllowedError):
            media.read(f"file://{root}/{name}", LIMIT)


def test_folder_may_itself_be_named_by_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    media = LocalMedia(str(link))
    assert media.read(f"file://{link}/a.png", LIMIT) == media.read(f"file://{root}/a.png", LIMIT) == DATA


@pytest.mark.parametrize(
    "tail",
    [
        "/../secret.png", "/%2e%2e/secret.png", "/inner/../../secret.png", "/..%2fsecret.png", "-too/a.png",
        "/missing.png",
        "", "/", "/inner", "/a.png/", "/a.png/x", "/a.png%00.jpg", "/a.png?x", "/a.png#x", "/a.png\\..", "/\ta.png",
    ],
)  # fmt: skip
def test_everything_else_is_refused_alike(root: Path, tail: str) -> None:
    media = LocalMedia(str(root))
    if tail == "/a.png/":  # the same file to the path's grammar
        assert media.read(f"file://{root}{tail}", LIMIT) == DATA
        return
    with pytest.raises(UrlNotAllowedError) as caught:
        media.read(f"file://{root}{tail}", LIMIT)
    assert str(root) not in caught.value.message
    assert "secret" not in caught.value.message


def test_only_plain_files_are_opened(root: Path) -> None:
    os.mkfifo(root / "pipe")
    media = LocalMedia(str(root))
    for name in ("pipe", "inner"):
        with pytest.raises(UrlNotAllowedError):
            media.read(f"file://{root}/{name}", LIMIT)


def test_exchanged_between_check_and_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path resolves to a plain file below the folder; by the time of the open its folder is a link outside."""
    media, real = LocalMedia(str(root)), os.path.realpath

    def resolve_then_exchange(path: str, **options: object) -> str:
        found = real(path)
        (root / "inner").rename(root / "was")
        (root / "inner").symlink_to(root.parent / "media-too")
        return found

    (root / "inner" / "a.png").write_bytes(DATA)
    monkeypatch.setattr(os.path, "realpath", resolve_then_exchange)
    with pytest.raises(UrlNotAllowedError):
        media.read(f"file://{root}/inner/a.png", LIMIT)


def test_size_is_judged_before_reading(root: Path) -> None:
    (root / "empty.png").touch()
    media = LocalMedia(str(root))
    with pytest.raises(MediaError) as caught:
        media.read(f"file://{root}/a.png", len(DATA) - 1)
    assert caught.value.code == "media_too_large"
    assert media.read(f"file://{root}/a.png", len(DATA)) == DATA
    with pytest.raises(MediaError) as caught:
        media.read(f"file://{root}/empty.png", LIMIT)
    assert caught.value.code == "empty_media"


@pytest.mark.parametrize(
    "url", ["file:a.png", "file:/a.png", "file://host/a.png", "file://a.png", "file:", "file:////x"]
)
def test_forms_of_no_local_path(root: Path, url: str) -> None:
    with pytest.raises(MediaError):
        LocalMedia(str(root)).check(url)


@given(st.text(max_size=60))
def test_any_text_is_below_the_folder_or_refused(text: str) -> None:
    media = LocalMedia("/tmp")
    try:
        media.check(f"file:///tmp/{text}")
    except MediaError:
        return
    assert ".." not in text.split("/")


def test_options() -> None:
    for bad in ("media", "/", "//", "."):
        with pytest.raises(ValueError, match="allowed_local_media_path"):
            PreprocessorConfig(allowed_local_media_path=bad)
    with pytest.raises(ValueError, match="existing folder"):
        LocalMedia("/no/such/folder")
    assert is_file_url("File:///x")
    assert not is_file_url("filer://x")
