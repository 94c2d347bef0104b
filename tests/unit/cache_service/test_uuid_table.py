from cache_service.identity import ContentDigest
from cache_service.uuid_table import Binding, UuidTable

RED, BLUE = ContentDigest(bytes(32)), ContentDigest(bytes([1]) * 32)


def test_the_payload_always_wins_and_conflicts_are_counted() -> None:
    table = UuidTable()
    assert table.lookup("a", "u") is None
    assert table.bind("a", "u", RED) is Binding.NEW
    assert table.bind("a", "u", RED) is Binding.SAME
    assert table.bind("a", "u", BLUE) is Binding.REBOUND
    assert table.lookup("a", "u") == BLUE
    assert (table.stats.new, table.stats.same, table.stats.rebound) == (1, 1, 1)


def test_namespaces_are_apart() -> None:
    table = UuidTable()
    table.bind("a", "u", RED)
    assert table.lookup("b", "u") is None
    assert table.bind("b", "u", BLUE) is Binding.NEW
    assert table.lookup("a", "u") == RED


def test_used_hints_outlive_unused_ones() -> None:
    table = UuidTable(5000)
    table.bind("a", "used", RED)
    for number in range(50):
        table.bind("a", f"u{number}", BLUE)
        assert table.bind("a", "used", RED) is Binding.SAME
    assert table.lookup("a", "u0") is None
    assert table.lru_stats().bytes <= 5000


def test_a_binding_without_room_leaves_no_stale_one() -> None:
    table = UuidTable(700)
    assert table.bind("a", "u", RED) is Binding.NEW
    assert table.bind("a", "u" * 1000, RED) is Binding.REFUSED
    assert table.lookup("a", "u") == RED
