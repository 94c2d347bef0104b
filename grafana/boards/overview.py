"""The first page at night: is it broken, for whom, since when, and which stage."""

from __future__ import annotations

from grafana.model import Dashboard, Panel, Query, Row, Thresholds
from grafana.queries import (
    DEPLOYMENT,
    REPLICA,
    mean,
    or_zero,
    part_or_zero,
    quantile,
    rate,
    ratio,
    series,
    total,
    total_rate,
)

_ALL = total(rate("requests_total"))
_FAULTS = total(rate("requests_total", 'status=~"5.."'))
_FIRST_TOKEN_LIMITS: Thresholds = ((1.0, "yellow"), (2.5, "red"))

_NOW = Row(
    title="Now",
    panels=(
        Panel(
            title="Requests",
            kind="stat",
            unit="reqps",
            width=4,
            height=4,
            description="Finished requests a second. 0 while clients send: look at the load balancer and at /ready.",
            queries=(Query(expr=total_rate("requests_total")),),
        ),
        Panel(
            title="Server errors",
            kind="stat",
            unit="percentunit",
            width=4,
            height=4,
            thresholds=((0.01, "yellow"), (0.05, "red")),
            runbook="Error ratio",
            description="Share of requests that ended with 5xx. Red: open the runbook, then Errors by status below.",
            queries=(Query(expr=or_zero(ratio(part_or_zero(_FAULTS, _ALL), _ALL))),),
        ),
        Panel(
            title="First token, p95",
            kind="stat",
            unit="s",
            width=4,
            height=4,
            thresholds=_FIRST_TOKEN_LIMITS,
            runbook="First token burn rate",
            description="Seconds from arrival to the first delta. Red: Mean time by stage shows who is slow.",
            queries=(Query(expr=quantile(0.95, "time_to_first_token_seconds")),),
        ),
        Panel(
            title="Between tokens, p99",
            kind="stat",
            unit="s",
            width=4,
            height=4,
            thresholds=((0.1, "yellow"), (0.2, "red")),
            description="Red: long prefills or encodes in the engine's process stall decoding; see the engine board.",
            queries=(Query(expr=quantile(0.99, "inter_token_seconds")),),
        ),
        Panel(
            title="Queued",
            kind="stat",
            width=4,
            height=4,
            thresholds=((1, "yellow"), (100, "red")),
            runbook="Rejections",
            description="Requests before admission. Above 0 for minutes: more load than replicas; see capacity.",
            queries=(Query(expr=total(series("requests_in_flight", 'state="queued"'))),),
        ),
        Panel(
            title="Alerts firing",
            kind="stat",
            width=4,
            height=4,
            thresholds=((1, "red"),),
            description="Names and labels are on Prometheus's Alerts page; every alert has a runbook entry.",
            queries=(
                Query(
                    expr='count(ALERTS{alertname=~"Sightline.*",alertstate="firing"})'
                    " or on () (0 * count(sightline_replica_start_time_seconds))"
                ),
            ),
        ),
    ),
)

_TRAFFIC = Row(
    title="Traffic and errors",
    panels=(
        Panel(
            title="Requests by status",
            unit="reqps",
            stacked=True,
            description="400: a client sends what cannot be served. 429, 503: no room. 499: clients leave, often since "
            "answers are slow. 500: a fault of ours, look for `request failed` in the logs.",
            queries=(Query(expr=total_rate("requests_total", "status"), legend="{{status}}"),),
        ),
        Panel(
            title="Requests by endpoint",
            unit="reqps",
            stacked=True,
            description="Which API is used. A sudden change is a client's, not ours.",
            queries=(Query(expr=total_rate("requests_total", "endpoint"), legend="{{endpoint}}"),),
        ),
        Panel(
            title="Share of failed requests",
            unit="percentunit",
            thresholds=((0.05, "red"),),
            runbook="Error ratio",
            description="Server errors page somebody at 5%. Refusals (429, 503) mean too few replicas or a caller "
            "above its share. A step in client errors is a client's release.",
            queries=(
                Query(expr=ratio(part_or_zero(_FAULTS, _ALL), _ALL), legend="server errors (5xx)"),
                Query(
                    expr=ratio(part_or_zero(total(rate("requests_total", 'status=~"429|503"')), _ALL), _ALL),
                    legend="refused (429, 503)",
                ),
                Query(
                    expr=ratio(
                        part_or_zero(total(rate("requests_total", 'status=~"4..",status!~"429|499"')), _ALL), _ALL
                    ),
                    legend="client errors (4xx)",
                ),
                Query(
                    expr=ratio(part_or_zero(total(rate("requests_total", 'status="499"')), _ALL), _ALL),
                    legend="client left (499)",
                ),
            ),
        ),
    ),
)

_LATENCY = Row(
    title="Latency",
    panels=(
        Panel(
            title="Time to first token",
            unit="s",
            thresholds=((2.5, "red"),),
            runbook="First token burn rate",
            description="Promise: 95% within 2.5 s. Only p99 moves: look for large pictures. p50 moves: queues.",
            queries=tuple(
                Query(expr=quantile(q, "time_to_first_token_seconds"), legend=f"p{q * 100:g}")
                for q in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Time between tokens",
            unit="s",
            description="p99 should stay below 1.5 times p50. Above: steps are too long, lower max_num_batched_tokens.",
            queries=tuple(
                Query(expr=quantile(q, "inter_token_seconds"), legend=f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Whole request",
            unit="s",
            description="Arrival to the last byte; grows with the answers' length, so compare with the token rate.",
            queries=tuple(
                Query(expr=quantile(q, "request_seconds", "endpoint"), legend=f"p{q * 100:g} {{{{endpoint}}}}")
                for q in (0.5, 0.95)
            ),
        ),
        Panel(
            title="Mean time by stage",
            unit="s",
            stacked=True,
            description="Where a request's time goes. admission, queue: too few replicas. fetch: slow picture hosts. "
            "decode, preprocess: preprocessor CPUs. encode, transfer: vision encoder. prefill, generation: engine. "
            "first_token spans the stages before it.",
            queries=(Query(expr=mean("request_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Panel(
            title="Stages, p95",
            unit="s",
            description="A stage whose p95 leaves its mean far behind has a few bad requests, not too little capacity.",
            queries=(Query(expr=quantile(0.95, "request_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Panel(
            title="Time to first token, distribution",
            kind="heatmap",
            unit="s",
            description="Two bands are two kinds of requests: texts and cached pictures below, new pictures above.",
            queries=(Query(expr=total(rate("time_to_first_token_seconds_bucket"), "le"), legend="{{le}}"),),
        ),
    ),
)

_PROMISE = Row(
    title="Queue and promise",
    panels=(
        Panel(
            title="Requests in flight",
            stacked=True,
            runbook="Rejections",
            description="A queue that does not drain is followed by 503s. Add LM engine replicas if its KV is full, "
            "preprocessors if their queue grows.",
            queries=(Query(expr=total(series("requests_in_flight"), "state"), legend="{{state}}"),),
        ),
        Panel(
            title="Refusals by budget",
            unit="ops",
            runbook="Rejections",
            description="Requests or items that were turned away for good. The budget's name says which limit.",
            queries=(
                Query(
                    expr=total_rate("budget_rejections_total", "budget", where=('outcome="rejected"',)),
                    legend="{{budget}}",
                ),
            ),
        ),
        Panel(
            title="Slow first tokens",
            unit="percentunit",
            thresholds=((0.05, "yellow"), (0.3, "orange"), (0.72, "red")),
            runbook="First token burn rate",
            description="Share of first tokens later than 2.5 s. 5% uses the promise up exactly; 72% in 5 minutes and "
            "in an hour pages at once. All replicas, whatever is chosen above.",
            queries=(
                Query(expr="sightline:first_token_slow:ratio_rate5m", legend="5 minutes"),
                Query(expr="sightline:first_token_slow:ratio_rate1h", legend="1 hour"),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="sightline-overview",
    title="Sightline / Overview",
    description="Traffic, errors, latency and queue of the whole application. Start here.",
    rows=(_NOW, _TRAFFIC, _LATENCY, _PROMISE),
    variables=(DEPLOYMENT, REPLICA),
)
