from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError, UrlNotAllowedError
from deployments.preprocessor.url_guard import FetchRules, FetchUrl, is_public, parse_url


# -- taking URLs apart ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://example.com", FetchUrl("http", "example.com", 80, "/")),
        ("HTTPS://Example.COM./a", FetchUrl("https", "example.com", 443, "/a")),
        ("http://example.com:8080?q=1", FetchUrl("http", "example.com", 8080, "/?q=1")),
        ("http://example.com:/a#frag", FetchUrl("http", "example.com", 80, "/a")),
        ("  http://example.com/a ", FetchUrl("http", "example.com", 80, "/a")),
        ("http://[2606:4700::1]:81/", FetchUrl("http", "2606:4700::1", 81, "/")),
        ("http://1.2.3.4/", FetchUrl("http", "1.2.3.4", 80, "/")),
        ("http://bücher.example/", FetchUrl("http", "xn--bcher-kva.example", 80, "/")),
        ("http://１.2.3.4/", FetchUrl("http", "1.2.3.4", 80, "/")),
        ("http://h/图 one.png", FetchUrl("http", "h", 80, "/%E5%9B%BE%20one.png")),
        ("http://h/s?sig=a%2Fb%2Bc%3D&x=1%202", FetchUrl("http", "h", 80, "/s?sig=a%2Fb%2Bc%3D&x=1%202")),
        ("http://h/a+b%2525.png", FetchUrl("http", "h", 80, "/a+b%2525.png")),
        ("http://h/a@b:c", FetchUrl("http", "h", 80, "/a@b:c")),
    ],
)
def test_parts(url: str, expected: FetchUrl) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "ftp://127.0.0.1/c.png",
        "gopher://x/",
        "javascript:alert(1)",
        "http://user:secret@h/",
        "http://user@h/",
        "http://h\\@evil/",
        "http://h/\\evil",
        "http://127.0.0\t.1/",
        "http://h/\r\nHost: evil",
        "http://h\x00/",
        "http://127.0.0.%31/",
        "http://[fe80::1%25eth0]/",
        "http://[::1/",
        "http://[v1.x]/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://2130706433/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.1.2/",
        "http://1.2.3.256/",
        "http://exa mple.com/",
    ],
)
def test_forms_on_which_parsers_disagree(url: str) -> None:
    with pytest.raises(UrlNotAllowedError) as caught:
        parse_url(url)
    assert caught.value.code == "url_not_allowed"
    assert "evil" not in caught.value.message
    assert "127" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/9j/4AAQSkZJRg==",
        "/etc/hostname",
        "../secret.png",
        "//127.0.0.1/c.png",
        "http:",
        "http:/h/",
        "http:///a",
        "http://",
        "http://h:0/",
        "http://h:65536/",
        "http://h:8a/",
        "http://h:１/",
        "http://-h-/",
        "http://a..b/",
        "http://" + "a" * 300 + "/",
        "http://h/" + "a" * 9000,
        "http://h/\ud83d",
    ],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(MediaError) as caught:
        parse_url(url)
    assert caught.value.code == "invalid_url"
    assert url not in caught.value.message or not url


def test_bare_base64_is_told_what_is_needed() -> None:
    with pytest.raises(MediaError, match=r"data:.*http"):
        parse_url("/9j/4AAQ")


@given(st.text(max_size=40))
def test_any_text_gives_clean_parts_or_a_media_error(text: str) -> None:
    for candidate in (text, "http://" + text, "https://h/" + text):
        try:
            url = parse_url(candidate)
        except MediaError:
            continue
        assert url.host.isascii()
        assert url.target.isascii()
        assert url.target.startswith("/")
        assert not set(url.host + url.target) & set(" \t\r\n\\#")
        assert "@" not in url.host


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://h/", "h"),
        ("http://h:443/", "h:443"),
        ("https://h:443/", "h"),
        ("http://[2606:4700::1]:81/", "[2606:4700::1]:81"),
    ],
)
def test_host_header(url: str, authority: str) -> None:
    assert parse_url(url).authority == authority


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b?x", "http://h:81/b?x"),
        ("c", "http://h:81/a/c"),
        ("?q", "http://h:81/a/b?q"),
        ("//other/x", "http://other/x"),
        ("https://other/x", "https://other/x"),
    ],
)
def test_redirect_targets(location: str, expected: str) -> None:
    assert parse_url("http://h:81/a/b").join(location) == parse_url(expected)


@pytest.mark.parametrize("location", ["file:///etc/hostname", "http://u@h/", "/a\\b", "/a\tb", "data:,x"])
def test_redirect_targets_are_as_strictly_parsed(location: str) -> None:
    with pytest.raises(UrlNotAllowedError):
        parse_url("http://h/").join(location)


# -- addresses --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.9.9.9",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.192",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:101:101::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%2",
        "2606:4700::1%2",
        "fec0::1",
        "ff02::1",
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@given(st.ip_addresses(v=4))
def test_mapped_and_translated_forms_are_judged_like_the_address_inside(address: object) -> None:
    plain = is_public(ip_address(str(address)))
    assert is_public(ip_address(f"::ffff:{address}")) == plain
    assert is_public(ip_address(int(ip_address("64:ff9b::")) + int(address))) == plain  # type: ignore[call-overload]


# -- lists ------------------------------------------------------------------------------------------------------------
def verdict(rules: FetchRules, url: str) -> bool:
    try:
        rules.check_url(parse_url(url))
    except UrlNotAllowedError:
        return False
    return True


def test_literal_addresses_are_judged_without_resolving() -> None:
    rules = FetchRules()
    assert not verdict(rules, "http://127.0.0.1/")
    assert not verdict(rules, "http://[::ffff:10.0.0.1]/")
    assert verdict(rules, "http://1.1.1.1/")


@pytest.mark.parametrize(
    ("entry", "url", "listed"),
    [
        ("example.com", "http://example.com/", True),
        ("Example.com", "http://EXAMPLE.com./", True),
        ("example.com", "http://a.example.com/", False),
        ("*.example.com", "http://a.b.example.com/", True),
        ("*.example.com", "http://example.com/", False),
        ("*.example.com", "http://badexample.com/", False),
        ("example.com:81", "http://example.com:81/", True),
        ("example.com:81", "http://example.com/", False),
        ("2606:4700::1", "http://[2606:4700::1]/", True),
        ("[2606:4700::1]:81", "http://[2606:4700::1]:81/", True),
        ("[2606:4700::1]:81", "http://[2606:4700::1]:82/", False),
    ],
)
def test_notation_of_the_lists(entry: str, url: str, listed: bool) -> None:
    assert verdict(FetchRules(allowed=(entry,)), url) == listed
    assert verdict(FetchRules(denied=(entry,)), url) != listed


def test_denied_is_stronger_than_allowed_and_internal() -> None:
    assert not verdict(FetchRules(allowed=("h",), internal=("h",), denied=("h",)), "http://h/")


def test_internal_hosts_may_have_private_addresses_on_their_port_only() -> None:
    rules = FetchRules(internal=("127.0.0.1:8000", "media.internal"))
    assert verdict(rules, "http://127.0.0.1:8000/")
    assert not verdict(rules, "http://127.0.0.1:8001/")
    rules.check_addresses("media.internal", 9, [ip_address("10.0.0.1")])
    with pytest.raises(UrlNotAllowedError):
        rules.check_addresses("other", 9, [ip_address("10.0.0.1")])


def test_one_private_address_spoils_a_name() -> None:
    addresses = [ip_address("1.1.1.1"), ip_address("10.0.0.1")]
    with pytest.raises(UrlNotAllowedError):
        FetchRules().check_addresses("h", 80, addresses)
