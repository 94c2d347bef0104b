"""`file:` URLs: nothing is read unless an operator names a folder, and then only plain files inside it.

    URL ─▶ path ─▶ below the folder, as text? ─▶ still, links resolved? ─▶ opened part by part ─▶ plain file? ─▶ bytes

The path is judged twice as a whole, and then opened one component after the other without following links, so that a
folder or link that is exchanged between the check and the open gains nothing. Every refusal reads the same, whether the
file exists or not, and names no path.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from deployments.errors import MediaError, UrlNotAllowedError

_SCHEME = "file:"
_MAX_URL_CHARS = 8192
_CHUNK_BYTES = 1 << 20


def is_file_url(url: str) -> bool:
    return url.lstrip(" ")[: len(_SCHEME)].lower() == _SCHEME


class LocalMedia:
    """Reads files below one folder. Blocks.

    Args:
        root: `allowed_local_media_path`; absolute, an existing folder.

    Raises:
        ValueError: `root` is no folder.
    """

    def __init__(self, root: str) -> None:
        self._named = Path(os.path.normpath(root))
        self._root = Path(os.path.realpath(root))
        if not self._root.is_dir():
            raise ValueError(f"allowed_local_media_path is {root!r}; allowed: an existing folder, or empty")

    def check(self, url: str) -> None:
        """Judge the URL without touching the disk. Raises UrlNotAllowedError or MediaError."""
        self._relative(url)

    def read(self, url: str, max_bytes: int) -> bytes:
        """The file's bytes.

        Raises:
            UrlNotAllowedError: Not a plain, readable file below the folder.
            MediaError: `invalid_url`, `media_too_large` (from the file's size, before reading), `empty_media`.
        """
        relative = self._relative(url)
        try:
            real = Path(os.path.realpath(self._root / relative))
            handle = self._open(real.relative_to(self._root).parts)
        except (OSError, ValueError):  # missing, unreadable, leads outside, a link that came in between
            raise _refused() from None
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                raise _refused()
            if state.st_size > max_bytes:
                raise _too_large(max_bytes)
            return _read(handle, max_bytes)
        except OSError:
            raise _refused() from None
        finally:
            os.close(handle)

    def _open(self, parts: tuple[str, ...]) -> int:
        """A descriptor of the file, opened component by component; a link in the way is an OSError."""
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, flags, dir_fd=folder)
                os.close(folder)
                folder = inner
            if not parts:
                raise IsADirectoryError
            # Not blocking, since opening a pipe would wait for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(parts[-1], flags, dir_fd=folder)
        finally:
            os.close(folder)

    def _relative(self, url: str) -> Path:
        path = _path(url)
        # As text: what climbs out is refused before the disk could tell anything about it.
        for root in (self._named, self._root):
            if path.is_relative_to(root):
                return path.relative_to(root)
        raise _refused()


def _path(url: str) -> Path:
    """The absolute, normalised path of a `file:` URL on this host."""
    url = url.strip(" ")
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"the URL is {len(url)} characters long; at most {_MAX_URL_CHARS}", code="invalid_url")
    rest = url[len(_SCHEME) :]
    if any(char <= "\x1f" or char in "\x7f\\?#" for char in rest):
        raise UrlNotAllowedError("a file: URL holds no control characters, backslash, query or fragment")
    host, slash, path = rest.removeprefix("//").partition("/")
    if not rest.startswith("//") or not slash or host.lower() not in ("", "localhost"):
        raise MediaError("a file: URL has the form file:///path", code="invalid_url")
    try:
        raw = unquote_to_bytes(path.encode())
    except UnicodeEncodeError:
        raise MediaError("the URL is not valid Unicode", code="invalid_url") from None
    if b"\0" in raw or b".." in raw.split(b"/"):
        raise _refused()
    return Path(os.path.normpath("/" + os.fsdecode(raw)))


def _read(handle: int, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while chunk := os.read(handle, _CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:  # it grew while it was read
            raise _too_large(max_bytes)
        chunks.append(chunk)
    if not chunks:
        raise MediaError("the file is empty", code="empty_media")
    return b"".join(chunks)


def _refused() -> UrlNotAllowedError:
    return UrlNotAllowedError("the file: URL names nothing that may be read")


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the media is larger than the {max_bytes} bytes that are allowed", code="media_too_large")
