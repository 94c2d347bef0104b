"""Which URLs and addresses may be fetched. Pure decisions; nothing here touches the network.

A URL is taken apart once, strictly, and the fetch is made from the parts, so that no second parser can read another
host in it. Forms on which parsers disagree (user info, backslash, control characters, percent signs in the host, short
or hexadecimal IPv4) are refused. Addresses are judged where the connection is made (fetch.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Literal
from urllib.parse import quote, urljoin

import idna

from deployments.errors import MediaError, UrlNotAllowedError

Address = IPv4Address | IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAX_URL_CHARS = 8192
_KEPT_IN_TARGET = "%/:?[]@!$&'()*+,;=~-._"

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_REFUSED_NETWORKS: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("168.63.129.16/32"),  # a cloud's host agent on a public address
    IPv4Network("192.0.0.0/24"),  # protocol assignments; another cloud's metadata
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv6Network("2001::/23"),  # protocol assignments, Teredo among them
    IPv6Network("2001:db8::/32"),  # documentation
    IPv6Network("2002::/16"),  # 6to4: an IPv4 address in disguise
    IPv6Network("3fff::/20"),  # documentation
)


@dataclass(frozen=True, slots=True)
class FetchUrl:
    """An http(s) URL in parts, each safe to be sent as it is."""

    scheme: Literal["http", "https"]
    host: str
    """Lower-case ASCII name without trailing dot, or an address without brackets."""
    port: int
    target: str
    """Path and query, percent-encoded; the fragment is gone."""

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def literal_address(self) -> Address | None:
        """The address, if the host is one."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    def join(self, location: str) -> FetchUrl:
        """Target of a redirect, as strictly parsed as a caller's URL."""
        _refuse_control_characters(location)
        if _SCHEME.match(location):
            return parse_url(location)
        return parse_url(urljoin(f"{self.scheme}://{self.authority}{self.target}", location))


def parse_url(url: str) -> FetchUrl:
    """Take an http(s) URL apart.

    Raises:
        UrlNotAllowedError: Another scheme, or a form on which parsers disagree.
        MediaError: `invalid_url` for text that is no URL at all.
    """
    url = url.strip(" ")
    scheme = _SCHEME.match(url)
    if not url or scheme is None:
        raise MediaError("a data:, http: or https: URL is needed", code="invalid_url")
    name = scheme[1].lower()
    if name not in _DEFAULT_PORTS:
        raise UrlNotAllowedError("only data:, http: and https: URLs are accepted")
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"the URL is {len(url)} characters long; at most {_MAX_URL_CHARS}", code="invalid_url")
    _refuse_control_characters(url)
    rest = url[scheme.end() :]
    if not rest.startswith("//"):
        raise MediaError("the URL has no host; it should start like https://host/", code="invalid_url")
    authority, target = _split_authority(rest[2:])
    host, port = _split_port(authority, _DEFAULT_PORTS[name])
    return FetchUrl("https" if name == "https" else "http", _normalise_host(host), port, _normalise_target(target))


def _refuse_control_characters(url: str) -> None:
    if any(char <= "\x1f" or char == "\x7f" for char in url):
        raise UrlNotAllowedError("the URL holds control characters")
    if "\\" in url:
        raise UrlNotAllowedError("the URL holds a backslash")


def _split_authority(rest: str) -> tuple[str, str]:
    end = next((i for i, char in enumerate(rest) if char in "/?#"), len(rest))
    target = rest[end:].partition("#")[0]
    return rest[:end], target if target.startswith("/") else "/" + target


def _split_port(authority: str, default: int) -> tuple[str, int]:
    if "@" in authority:
        raise UrlNotAllowedError("the URL holds a user name or password")
    bracket = authority.rfind("]")
    if authority.startswith("[") and bracket < 0:
        raise UrlNotAllowedError("the URL's host is no plain IPv6 address")
    colon = authority.find(":", bracket + 1)
    if colon < 0:
        return authority, default
    text = authority[colon + 1 :]
    if not text:
        return authority[:colon], default
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise MediaError("the URL's port is not a number from 1 to 65535", code="invalid_url")
    return authority[:colon], int(text)


def _normalise_host(host: str) -> str:
    if not host:
        raise MediaError("the URL has no host", code="invalid_url")
    if host.startswith("["):
        return _normalise_ipv6(host)
    if "%" in host or "[" in host or "]" in host or " " in host:
        raise UrlNotAllowedError("the URL's host holds characters that no host name has")
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            raise MediaError("the URL's host is no valid international name", code="invalid_url") from None
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        return _normalise_ipv4(host)
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise MediaError("the URL's host is no valid name", code="invalid_url")
    return host


def _normalise_ipv4(host: str) -> str:
    try:
        return str(IPv4Address(host))
    except ValueError:
        raise UrlNotAllowedError("an IPv4 address is only accepted as four decimal numbers") from None


def _normalise_ipv6(host: str) -> str:
    try:
        if not host.endswith("]") or "%" in host:
            raise ValueError
        return str(IPv6Address(host[1:-1]))
    except ValueError:
        raise UrlNotAllowedError("the URL's host is no plain IPv6 address") from None


def _normalise_target(target: str) -> str:
    try:
        return quote(target, safe=_KEPT_IN_TARGET)
    except UnicodeEncodeError:
        raise MediaError("the URL is not valid Unicode", code="invalid_url") from None


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public Internet, whichever way it is written.

    IPv4 inside IPv6 (mapped, NAT64) is judged by the IPv4 address; other disguises (6to4, Teredo, compatible) are
    refused, as is all of IPv6 outside global unicast.
    """
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST or address.scope_id is not None:
            return False
    if any(address.version == network.version and address in network for network in _REFUSED_NETWORKS):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRules:
    """An operator's lists, and the verdicts they lead to.

    Names are hosts (`example.com`), everything below a host (`*.example.com`) or, for `internal`, also `host:port`.
    """

    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    internal: tuple[str, ...] = ()

    def check_url(self, url: FetchUrl) -> None:
        """Judge what can be judged without resolving the name. Raises UrlNotAllowedError."""
        if _listed(url, self.denied) or (self.allowed and not _listed(url, self.allowed)):
            raise UrlNotAllowedError("media may not be fetched from this host")
        if (address := url.literal_address) is not None:
            self.check_addresses(url.host, url.port, [address])

    def check_addresses(self, host: str, port: int, addresses: Sequence[Address]) -> None:
        """Judge all addresses that a name resolved to: one bad one spoils them all. Raises UrlNotAllowedError."""
        if _listed(FetchUrl("http", host, port, "/"), self.internal):
            return
        if not all(is_public(address) for address in addresses):
            raise UrlNotAllowedError("media may not be fetched from addresses that are not public")


def _listed(url: FetchUrl, entries: Sequence[str]) -> bool:
    return any(_matches(url, entry.lower()) for entry in entries)


def _matches(url: FetchUrl, entry: str) -> bool:
    name, port = _split_entry(entry)
    if port is not None and port != url.port:
        return False
    if name.startswith("*."):
        return url.host.endswith(name[1:])
    return url.host == name.removesuffix(".")


def _split_entry(entry: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address."""
    if entry.startswith("["):
        name, _, port = entry[1:].partition("]")
        return name, int(port[1:]) if port.startswith(":") else None
    name, _, port = entry.partition(":")
    if port.isdigit():
        return name, int(port)
    return entry, None
