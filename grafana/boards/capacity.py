"""How many replicas there are, how busy each is, and whether more are needed. Some panels read Ray's own metrics."""

from __future__ import annotations

from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import DEPLOYMENT, EVERY_REPLICA, REPLICA, rate, ratio, series, total, total_rate

_RAY = "the metrics that Ray's own agents export (job `ray` of prometheus.yml)"
_RAY_DEPLOYMENT = 'deployment=~"$deployment"'

_REPLICAS = Row(
    title="Replicas",
    panels=(
        Panel(
            title="Replicas by deployment",
            runbook="Deployment gone",
            description="Replicas that answer scrapes. Fewer than the autoscaler's target: they start, crash, or find "
            "no resources.",
            queries=(Query(expr=f"count by (deployment) ({series(EVERY_REPLICA)})", legend="{{deployment}}"),),
        ),
        Panel(
            title="Replicas younger than 10 minutes",
            description="Scaling up or a release if you know of one; else replicas crash and are replaced.",
            queries=(
                Query(
                    expr=f"count by (deployment) (time() - {series(EVERY_REPLICA)} < 600)"
                    f" or 0 * count by (deployment) ({series(EVERY_REPLICA)})",
                    legend="{{deployment}}",
                ),
            ),
        ),
        Panel(
            title="Autoscaling target",
            needs=_RAY,
            description="target: what the autoscaler goes for. desired: what its policy asked for before the bounds; "
            "above target, max_replicas is the limit.",
            queries=(
                Query(
                    expr=f"max by (deployment) (ray_serve_autoscaling_target_replicas{{{_RAY_DEPLOYMENT}}})",
                    legend="{{deployment}} target",
                ),
                Query(
                    expr=f"max by (deployment) (ray_serve_autoscaling_desired_replicas{{{_RAY_DEPLOYMENT}}})",
                    legend="{{deployment}} desired",
                ),
            ),
        ),
        Panel(
            title="Age of replicas' metrics",
            unit="s",
            runbook="Silent replica",
            thresholds=((60, "red"),),
            description="0 while a replica answers. Above it, all of the replica's series stand still at their last "
            "values, and the replica most likely serves nobody.",
            queries=(Query(expr=total(series("metrics_age_seconds"), "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Healthy replicas, as Ray sees them",
            needs=_RAY,
            description="More than answer scrapes: a replica is up but its event loop is blocked for seconds.",
            queries=(
                Query(
                    expr=f"sum by (deployment) (ray_serve_deployment_replica_healthy{{{_RAY_DEPLOYMENT}}})",
                    legend="{{deployment}}",
                ),
            ),
        ),
    ),
)

_LOAD = Row(
    title="Load by replica",
    panels=(
        Panel(
            title="Requests in flight by ingress replica",
            description="Uneven: the load balancer keeps connections; it should spread requests instead.",
            queries=(
                Query(expr=total(series("requests_in_flight"), "replica", "state"), legend="{{replica}} {{state}}"),
            ),
        ),
        Panel(
            title="Sequences by engine replica",
            description="Uneven while some wait: routing by session, one caller sends most of the load.",
            queries=(
                Query(expr=total(series("scheduler_requests"), "replica", "state"), legend="{{replica}} {{state}}"),
            ),
        ),
        Panel(
            title="Encoder busy",
            unit="percentunit",
            max_value=1,
            thresholds=((0.85, "yellow"),),
            description="Share of time in forward passes. Above 85%: encode queues grow; add vision encoder replicas.",
            queries=(Query(expr=total(rate("encoder_batch_seconds_total"), "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Tokens a second by engine replica",
            unit="ops",
            stacked=True,
            description="What one replica gives at its limit; demand divided by it is the number of replicas to have.",
            queries=(Query(expr=total_rate("generated_tokens_total", "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="KV in use by engine replica",
            unit="percentunit",
            max_value=1,
            description="Above 90% everywhere: more replicas. Above 90% on one: routing.",
            queries=(
                Query(
                    expr=ratio(
                        total(series("kv_blocks", 'state="used"'), "replica"), total(series("kv_blocks"), "replica")
                    ),
                    legend="{{replica}}",
                ),
            ),
        ),
        Panel(
            title="Queries queued in handles",
            needs=_RAY,
            description="Calls that wait for a replica with room, by the deployment that is called: the one to scale.",
            queries=(
                Query(
                    expr=f"sum by (deployment) (ray_serve_deployment_queued_queries{{{_RAY_DEPLOYMENT}}})",
                    legend="{{deployment}}",
                ),
            ),
        ),
    ),
)

_CLUSTER = Row(
    title="Ray cluster",
    panels=(
        Panel(
            title="Object store",
            unit="bytes",
            needs=_RAY,
            stacked=True,
            description="Patches and embeddings in flight. SPILLED above 0 costs latency. Must come back to its base "
            "line when traffic ends; if not, references leak.",
            queries=(Query(expr="sum by (Location) (ray_object_store_memory)", legend="{{Location}}"),),
        ),
        Panel(
            title="Object store in use",
            unit="percentunit",
            needs=_RAY,
            max_value=1,
            thresholds=((0.8, "yellow"), (0.95, "red")),
            description="By node. Near 1: puts fail with 503; raise --object-store-memory or lower what is in flight.",
            queries=(
                Query(
                    expr='sum by (instance) (ray_object_store_memory{Location!="SPILLED"})'
                    ' / sum by (instance) (ray_resources{Name="object_store_memory"})',
                    legend="{{instance}}",
                ),
            ),
        ),
        Panel(
            title="CPUs and GPUs in use",
            unit="percentunit",
            needs=_RAY,
            max_value=1,
            description="Logical resources that replicas hold. 1: the next replica waits for a node.",
            queries=(
                Query(
                    expr='sum by (Name) (ray_resources{Name=~"CPU|GPU",State="USED"})'
                    ' / (sum by (Name) (ray_resources{Name=~"CPU|GPU"}) > 0)',
                    legend="{{Name}}",
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="sightline-capacity",
    title="Sightline / Capacity",
    description="Replicas, their load, autoscaling and the Ray cluster below.",
    rows=(_REPLICAS, _LOAD, _CLUSTER),
    variables=(DEPLOYMENT, REPLICA),
)
