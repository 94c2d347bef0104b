"""PromQL for Sightline's families, in the few forms that the dashboards need.

Two rules hold everywhere. A count that nothing has raised yet reads 0 while any replica is scraped, and is absent when
none is, so that "nothing happened" and "nobody looks" differ. A ratio without traffic is absent: 0 would be a lie.
"""

from __future__ import annotations

from grafana.model import Variable

INTERVAL = "$__rate_interval"
EVERY_REPLICA = "replica_start_time_seconds"
"""The family that each replica exports exactly once."""

DEPLOYMENT = Variable(
    name="deployment", label="Deployment", query=f"label_values(sightline_{EVERY_REPLICA}, deployment)"
)
REPLICA = Variable(
    name="replica",
    label="Replica",
    query=f'label_values(sightline_{EVERY_REPLICA}{{deployment=~"$deployment"}}, replica)',
)
TENANT = Variable(name="tenant", label="Tenant", query="label_values(sightline_tenant_requests_total, tenant)")


def series(name: str, *matchers: str) -> str:
    """The family's series of the chosen replicas; `matchers` such as `'state="free"'`."""
    chosen = ('deployment=~"$deployment"', 'replica=~"$replica"', *matchers)
    return f"sightline_{name}{{{','.join(chosen)}}}"


def rate(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[{INTERVAL}])"


def total(inner: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"


def or_zero(expr: str, *by: str) -> str:
    """`expr`, or one series of 0 whose label is `none` if it is empty while replicas are scraped."""
    zero = f"0 * count({series(EVERY_REPLICA)})"
    for label in by:
        zero = f'label_replace({zero}, "{label}", "none", "", "")'
    return f"({expr}) or on () ({zero})"


def total_rate(name: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """Events a second, summed over replicas; 0 if there were none."""
    return or_zero(total(rate(name, *where), *by), *by)


def ratio(part: str, whole: str) -> str:
    """`part / whole`, absent while `whole` is 0."""
    return f"({part}) / (({whole}) > 0)"


def part_or_zero(part: str, whole: str) -> str:
    """`part` where it exists, else 0 where `whole` exists, so that a ratio of something that never happened is 0."""
    return f"(({part}) or (0 * ({whole})))"


def quantile(q: float, name: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """Of a histogram over the chosen replicas; absent without observations."""
    return f"histogram_quantile({q:g}, {total(rate(name + '_bucket', *where), *by, 'le')})"


def mean(name: str, *by: str) -> str:
    """Of a histogram, absent without observations."""
    return ratio(total(rate(name + "_sum"), *by), total(rate(name + "_count"), *by))
