"""Who uses the service: requests, refusals and tokens by tenant. Names come from the key file; others are `other`."""

from __future__ import annotations

from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import DEPLOYMENT, REPLICA, TENANT, or_zero, part_or_zero, rate, ratio, total

_CHOSEN = 'tenant=~"$tenant"'
_REQUESTS = total(rate("tenant_requests_total", _CHOSEN), "tenant")
_PROMPT = total(rate("tenant_tokens_total", _CHOSEN, 'kind="prompt"'), "tenant")


def _share_of_requests(*matchers: str) -> str:
    matching = total(rate("tenant_requests_total", _CHOSEN, *matchers), "tenant")
    return ratio(part_or_zero(matching, _REQUESTS), _REQUESTS)


def _tokens(kind: str) -> str:
    return or_zero(total(rate("tenant_tokens_total", _CHOSEN, f'kind="{kind}"'), "tenant"), "tenant")


def _share_of_prompt(kind: str) -> str:
    part = total(rate("tenant_tokens_total", _CHOSEN, f'kind="{kind}"'), "tenant")
    return ratio(part_or_zero(part, _PROMPT), _PROMPT)


_USE = Row(
    title="Use",
    panels=(
        Panel(
            title="Requests by tenant",
            unit="reqps",
            stacked=True,
            description="Who sends the load. One tenant above its agreed rate: set requests_per_second for its keys.",
            queries=(Query(expr=or_zero(_REQUESTS, "tenant"), legend="{{tenant}}"),),
        ),
        Panel(
            title="Generated tokens by tenant",
            unit="ops",
            stacked=True,
            description="Decode work, the scarce part of the engine.",
            queries=(Query(expr=_tokens("generated"), legend="{{tenant}}"),),
        ),
        Panel(
            title="Prompt tokens by tenant",
            unit="ops",
            stacked=True,
            description="Prefill work, cached tokens included.",
            queries=(Query(expr=_tokens("prompt"), legend="{{tenant}}"),),
        ),
        Panel(
            title="Picture tokens by tenant",
            unit="ops",
            stacked=True,
            description="Part of the prompt that is pictures and videos; the vision encoder's load follows it.",
            queries=(Query(expr=_tokens("image"), legend="{{tenant}}"),),
        ),
        Panel(
            title="Cached share of prompts",
            unit="percentunit",
            max_value=1,
            description="Low for a tenant with long fixed prompts: its changing part comes first; tell its developers.",
            queries=(Query(expr=_share_of_prompt("cached"), legend="{{tenant}}"),),
        ),
    ),
)

_TROUBLE = Row(
    title="Trouble",
    panels=(
        Panel(
            title="Refused, by tenant",
            unit="percentunit",
            max_value=1,
            runbook="Rejections",
            description="429 and 503. One tenant: it is above its limits. All: too few replicas.",
            queries=(Query(expr=_share_of_requests('status=~"429|503"'), legend="{{tenant}}"),),
        ),
        Panel(
            title="Client errors, by tenant",
            unit="percentunit",
            max_value=1,
            description="400 and its kin without 429 and 499: the tenant's software sends what cannot be served.",
            queries=(Query(expr=_share_of_requests('status=~"4.."', 'status!~"429|499"'), legend="{{tenant}}"),),
        ),
        Panel(
            title="Server errors, by tenant",
            unit="percentunit",
            max_value=1,
            runbook="Error ratio",
            description="One tenant only: something in its requests sets a fault of ours off.",
            queries=(Query(expr=_share_of_requests('status=~"5.."'), legend="{{tenant}}"),),
        ),
        Panel(
            title="Largest tenants, last hour",
            kind="table",
            width=24,
            description="Requests by tenant, largest first.",
            queries=(
                Query(
                    expr='topk(20, sum by (tenant) (increase(sightline_tenant_requests_total{tenant=~"$tenant"}[1h])))'
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="sightline-tenants",
    title="Sightline / Tenants",
    description="Use and trouble by tenant.",
    rows=(_USE, _TROUBLE),
    variables=(DEPLOYMENT, REPLICA, TENANT),
)
