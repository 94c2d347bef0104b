import json
from pathlib import Path
from typing import Any

import pytest

from cache_service.tenant_file import KEYS_VARIABLE, load_tenants
from cache_service.tenants import OpenTenant, Tenant, TenantLimits, TenantRegistry, hash_api_key

KEY, OTHER_KEY = "sl-key-of-acme-0123456789", "sl-key-of-blue-0123456789"


def document(**changes: Any) -> dict[str, Any]:
    entry = {"name": "acme", "keys": [KEY], "limits": {"requests_per_minute": 60}} | changes
    return {"tenants": [entry, {"name": "blue", "key_hashes": [hash_api_key(OTHER_KEY)]}]}


def test_keys_lead_to_their_tenants() -> None:
    registry = TenantRegistry.from_mapping(document())
    acme, blue = registry.authenticate(KEY), registry.authenticate(OTHER_KEY)
    assert acme is not None
    assert blue is not None
    assert (acme.name, blue.name) == ("acme", "blue")
    assert acme.limits.requests_per_minute == 60
    assert not registry.is_open
    assert [tenant.name for tenant in registry.tenants] == ["acme", "blue"]


@pytest.mark.parametrize("key", [None, "", "x", KEY + " ", KEY[:-1], hash_api_key(KEY), "\ud800"])
def test_other_keys_lead_nowhere(key: str | None) -> None:
    assert TenantRegistry.from_mapping(document()).authenticate(key) is None


def test_a_tenant_may_roll_its_keys_over() -> None:
    registry = TenantRegistry.from_mapping(document(keys=[KEY, KEY + "-next"]))
    assert registry.authenticate(KEY) is registry.authenticate(KEY + "-next")


def test_no_key_is_kept_as_text() -> None:
    registry = TenantRegistry.from_mapping(document())
    assert KEY not in repr(vars(registry))


def test_without_keys_everybody_is_the_open_tenant() -> None:
    registry = TenantRegistry()
    assert registry.is_open
    tenant = registry.authenticate(None)
    assert tenant == OpenTenant() == registry.authenticate("anything")
    assert tenant is not None
    assert tenant.namespace == ""


def test_namespaces_are_apart_unless_shared_by_both() -> None:
    alone, named_like_the_group = Tenant(name="acme"), Tenant(name="labs")
    red, blue = Tenant(name="red", share_group="labs"), Tenant(name="blue", share_group="labs")
    assert red.namespace == blue.namespace
    assert len({alone.namespace, named_like_the_group.namespace, red.namespace, OpenTenant().namespace}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, r"tenants\[0\]: a tenant's name"),
        ({"name": 3}, r"tenants\[0\].name must be a string"),
        ({"name": "blue"}, "two tenants are called 'blue'"),
        ({"share_group": "x/y"}, "share_group"),
        ({"keys": []}, "has no keys"),
        ({"keys": ["short"]}, "at least 16 characters, one has 5"),
        ({"keys": KEY}, "must be a list of strings"),
        ({"keys": [OTHER_KEY]}, "already taken"),
        ({"key_hashes": ["md5:00"]}, "64 hex digits"),
        ({"limit": {}}, r"tenants\[0\] has unknown options \['limit'\]"),
        ({"limits": {"rpm": 1}}, "unknown options"),
        ({"limits": {"requests_per_minute": 0}}, "requests_per_minute must be a number above 0"),
        ({"limits": {"requests_per_minute": "9"}}, "requests_per_minute must be a number"),
        ({"limits": {"max_image_bytes": 1.5}}, "max_image_bytes must be an integer"),
        ({"limits": {"max_image_bytes": True}}, "max_image_bytes must be an integer"),
        ({"limits": {"burst_requests": 0.5}}, "burst_requests must be 1 or more"),
        ({"limits": [1]}, "limits must be a mapping"),
    ],
)
def test_mistakes_are_named_and_no_key_is_shown(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TenantRegistry.from_mapping(document(**changes))
    assert KEY not in str(caught.value)


def test_infinite_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="requests_per_minute"):
        TenantLimits(requests_per_minute=float("inf"))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_tenants_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tenants{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(document()))
    else:
        path.write_text(f'tenants:\n  - name: acme\n    key_hashes: ["{hash_api_key(KEY)}"]\n')
    tenant = load_tenants(str(path)).authenticate(KEY)
    assert tenant is not None
    assert tenant.name == "acme"


def test_tenants_from_the_environment() -> None:
    as_json = load_tenants(environment={KEYS_VARIABLE: json.dumps(document())})
    tenant = as_json.authenticate(KEY)
    assert tenant is not None
    assert tenant.name == "acme"
    as_list = load_tenants(environment={KEYS_VARIABLE: f"{KEY}, {OTHER_KEY}"})
    assert as_list.authenticate(KEY) == as_list.authenticate(OTHER_KEY) == Tenant(name="default")


def test_nothing_given_means_open() -> None:
    assert load_tenants().is_open
    assert load_tenants(environment={KEYS_VARIABLE: " "}).is_open


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a mapping with the key `tenants`"),
        ("tenants: []", "names no tenants"),
        ("- 1", "a mapping"),
        ("tenants: 3", "must be a list"),
        ("tenants: [3]", r"tenants\[0\] must be a mapping"),
        (f"tenants: [{KEY}", "neither YAML nor JSON"),
    ],
)
def test_unusable_files_never_mean_open(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_tenants(str(path))
    assert KEY not in str(caught.value)


def test_missing_file_both_sources_and_bad_json_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_tenants(str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match="not from both"):
        load_tenants("x", {KEYS_VARIABLE: KEY})
    with pytest.raises(ValueError, match="starts like JSON") as caught:
        load_tenants(environment={KEYS_VARIABLE: "{" + KEY})
    assert KEY not in str(caught.value)
