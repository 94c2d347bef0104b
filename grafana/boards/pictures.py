"""What happens to pictures and videos: preparation, caches, the vision encoder, and the budgets that say no."""

from __future__ import annotations

from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import DEPLOYMENT, REPLICA, or_zero, part_or_zero, quantile, rate, ratio, series, total, total_rate

_LOOKUPS = total(rate("cache_lookups_total"), "tier")
_HITS = total(rate("cache_lookups_total", 'result="hit"'), "tier")
_PASSES = total(rate("encoder_invocations_total"), "modality")
_GRAPH_PASSES = total(rate("encoder_invocations_total", 'path="graph"'), "modality")
_PADDED = total(rate("encoder_padded_tokens_total"), "modality")
_USEFUL = total(rate("encoder_tokens_total"), "modality")

_MEDIA = Row(
    title="Items",
    panels=(
        Panel(
            title="Items prepared",
            unit="ops",
            description="seen: all that requests brought. decoded: no cache knew them. remade: patches made again for "
            "an encoder that had lost them; above 0 for long, the object store is too small.",
            queries=(Query(expr=total_rate("media_total", "modality", "outcome"), legend="{{modality}} {{outcome}}"),),
        ),
        Panel(
            title="Items encoded",
            unit="ops",
            stacked=True,
            description="What no cache had. Near the items seen: pictures do not repeat, or caches are too small.",
            queries=(Query(expr=total_rate("encoder_items_total", "modality"), legend="{{modality}}"),),
        ),
        Panel(
            title="Denials by budget and outcome",
            unit="ops",
            runbook="Rejections",
            description="deferred: waits for a later step, normal under load; steadily high for one budget means that "
            "this one limits throughput. rejected: can never fit or no room, the client got an error.",
            queries=(
                Query(
                    expr=total_rate("budget_rejections_total", "budget", "outcome"),
                    legend="{{budget}} {{outcome}}",
                ),
            ),
        ),
    ),
)

_CACHES = Row(
    title="Caches",
    panels=(
        Panel(
            title="Look-ups by tier and result",
            unit="ops",
            description="A look-up that misses one tier asks the next, so tiers add up to more than items.",
            queries=(Query(expr=total_rate("cache_lookups_total", "tier", "result"), legend="{{tier}} {{result}}"),),
        ),
        Panel(
            title="Hit ratio by tier",
            unit="percentunit",
            max_value=1,
            description="A drop after a release: keys changed, it recovers as caches fill. A slow decline with rising "
            "evictions: the tier is too small.",
            queries=(Query(expr=ratio(part_or_zero(_HITS, _LOOKUPS), _LOOKUPS), legend="{{tier}}"),),
        ),
        Panel(
            title="Errors and corrupt entries",
            unit="ops",
            thresholds=((0.001, "red"),),
            runbook="Corrupt cache entries",
            description="Must be 0. An error is a tier that does not answer; a corrupt entry failed its checksum and "
            "was deleted. Requests go on as misses.",
            queries=(
                Query(
                    expr=total_rate("cache_lookups_total", "tier", "result", where=('result=~"error|corrupt"',)),
                    legend="{{tier}} {{result}}",
                ),
            ),
        ),
        Panel(
            title="Bytes held by tier",
            unit="bytes",
            stacked=True,
            description="At its limit and evicting is how a cache works; growing without end is not.",
            queries=(Query(expr=total(series("cache_bytes"), "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="Evictions by tier",
            unit="ops",
            description="Together with a falling hit ratio: give the tier more bytes.",
            queries=(Query(expr=total_rate("cache_evictions_total", "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="Transfers by tier and direction",
            unit="Bps",
            description="Reads from redis replace encoding; if they approach the network's limit, keep less there.",
            queries=(
                Query(
                    expr=total_rate("cache_transfer_bytes_total", "tier", "direction"), legend="{{tier}} {{direction}}"
                ),
            ),
        ),
        Panel(
            title="Replicas that skip a tier",
            thresholds=((1, "red"),),
            runbook="Cache tier skipped",
            description="Circuit breakers that are open. All replicas: the tier is down. One: its node's network.",
            queries=(Query(expr=or_zero(total(series("cache_breaker_open"), "tier"), "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="Single-flight joins",
            unit="ops",
            description="Callers that waited for another one's result: encodes saved when the same picture comes at "
            "once, in a replica or across them.",
            queries=(Query(expr=total_rate("single_flight_joins_total", "scope"), legend="{{scope}}"),),
        ),
    ),
)

_ENCODER = Row(
    title="Vision encoder",
    panels=(
        Panel(
            title="Passes by path",
            unit="ops",
            stacked=True,
            description="graph: replayed. static: padded buffers without capture (CPU). eager: neither.",
            queries=(
                Query(expr=total_rate("encoder_invocations_total", "modality", "path"), legend="{{modality}} {{path}}"),
            ),
        ),
        Panel(
            title="Graph hit rate",
            unit="percentunit",
            max_value=1,
            runbook="Encoder falls back to eager",
            description="Share of passes that replayed a graph. Low on a GPU: see the fallbacks' reasons. 0 on CPU.",
            queries=(Query(expr=ratio(part_or_zero(_GRAPH_PASSES, _PASSES), _PASSES), legend="{{modality}}"),),
        ),
        Panel(
            title="Eager fallbacks by reason",
            unit="ops",
            runbook="Encoder falls back to eager",
            description="slots, patches, items, segments, frames: larger than the largest graph, extend the ladder. "
            "cheaper: meant. replay_failed: a fault.",
            queries=(Query(expr=total_rate("encoder_eager_fallbacks_total", "reason"), legend="{{reason}}"),),
        ),
        Panel(
            title="Replays by budget",
            unit="ops",
            stacked=True,
            description="Budgets that are never replayed cost memory for nothing; take them out of the ladder.",
            queries=(Query(expr=total_rate("encoder_graph_replays_total", "budget"), legend="{{budget}} slots"),),
        ),
        Panel(
            title="Padding waste",
            unit="percentunit",
            max_value=1,
            thresholds=((0.3, "yellow"),),
            description="Share of computed slots that belong to nobody. Above 30%: put budgets between the used ones.",
            queries=(
                Query(
                    expr=ratio(part_or_zero(_PADDED, _USEFUL), f"{part_or_zero(_PADDED, _USEFUL)} + {_USEFUL}"),
                    legend="{{modality}}",
                ),
            ),
        ),
        Panel(
            title="Items per pass",
            description="1 under load: the batch wait is too short or items are too large to be packed.",
            queries=tuple(Query(expr=quantile(q, "encoder_batch_items"), legend=f"p{q * 100:g}") for q in (0.5, 0.95)),
        ),
        Panel(
            title="Seconds per pass",
            unit="s",
            description="Upload to result. Rising with equal sizes: the GPU is shared, throttled, or graphs are off.",
            queries=(
                Query(
                    expr=ratio(total(rate("encoder_batch_seconds_total"), "modality"), _PASSES), legend="{{modality}}"
                ),
            ),
        ),
        Panel(
            title="Held back for decoding",
            unit="percentunit",
            description="Share of the time that an encoder beside a language model waits so that tokens keep coming. "
            "High with pictures queued: raise colocated_share, or give the encoder a GPU of its own.",
            queries=(Query(expr=total(rate("encoder_paced_seconds_total"), "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Failed passes",
            unit="ops",
            thresholds=((0.001, "red"),),
            runbook="Encoder failures",
            description="out_of_memory: lower the encoder's memory budget. error: the log has the cause.",
            queries=(Query(expr=total_rate("encoder_batch_failures_total", "kind"), legend="{{kind}}"),),
        ),
        Panel(
            title="Memory of passes and graphs",
            unit="bytes",
            runbook="Encoder failures",
            description="Largest pass so far, predicted and measured, and what captured graphs hold; of the replica "
            "with most. measured above predicted: the limit on passes does not hold; lower batch_memory_fraction. "
            "Both are 0 on CPU without batch_memory_bytes.",
            queries=(
                Query(expr=f"max by (kind) ({series('encoder_peak_bytes')})", legend="{{kind}} peak"),
                Query(expr=f"max({series('encoder_graph_bytes')})", legend="graphs"),
            ),
        ),
        Panel(
            title="Time to capture",
            unit="s",
            description="Calibration and capture at start, by replica: part of how long a new replica takes to serve. "
            "Too long: fewer encoder_cudagraph_steps_per_octave.",
            queries=(Query(expr=total(series("encoder_capture_seconds"), "replica"), legend="{{replica}}"),),
        ),
    ),
)

_TRANSFER = Row(
    title="Embeddings on their way to the engine",
    panels=(
        Panel(
            title="Bytes moved by direction and back end",
            unit="Bps",
            description="put: by encoders. get: by engines; above put, as one embedding may be got by several. Near "
            "the network's limit: more engines where the encoders are.",
            queries=(
                Query(
                    expr=total_rate("embedding_transfer_bytes_total", "direction", "backend"),
                    legend="{{direction}} {{backend}}",
                ),
            ),
        ),
        Panel(
            title="Seconds to move one",
            unit="s",
            description="p95. put: until others can get it. get: until the engine can read it, without the copy to its "
            "device. Rising puts: the object store is full or spills.",
            queries=(
                Query(
                    expr=quantile(0.95, "embedding_transfer_seconds", "direction", "backend"),
                    legend="{{direction}} {{backend}}",
                ),
            ),
        ),
        Panel(
            title="Host memory for embeddings",
            unit="bytes",
            stacked=True,
            description="Used while an embedding is copied to the device. Full for long: raise "
            "lm_engine.embed_pool_bytes.",
            queries=(Query(expr=total(series("embedding_pool_bytes"), "state"), legend="{{state}}"),),
        ),
        Panel(
            title="Embeddings that wait for host memory",
            description="By replica. Above 0 now and then: a burst of large pictures. For long: raise "
            "lm_engine.embed_pool_bytes.",
            queries=(Query(expr=total(series("embedding_pool_waiting"), "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Host memory taken and never used",
            unit="ops",
            thresholds=((0.001, "red"),),
            description="Must be 0: it was given back, but who took it is lost. The log has the size; report it.",
            queries=(Query(expr=total_rate("embedding_pool_expired_total")),),
        ),
        Panel(
            title="Second calls for slow encodes",
            unit="ops",
            description="won: the other replica answered first, so one hangs or is overloaded. lost: patience was too "
            "short. over_budget: none was made, since lm_engine.hedging.max_share is used up; for long, all replicas "
            "are slow: add some.",
            queries=(Query(expr=total_rate("encoder_hedges_total", "outcome"), legend="{{outcome}}"),),
        ),
    ),
)

_READING = Row(
    title="Fetching and decoding",
    panels=(
        Panel(
            title="Fetches by outcome",
            unit="ops",
            description="refused: the URL, or one that it redirects to, may not be fetched. timed_out, failed: the "
            "picture's host; many of one kind for one caller are its own hosts.",
            queries=(Query(expr=total_rate("media_fetches_total", "outcome"), legend="{{outcome}}"),),
        ),
        Panel(
            title="Fetches under way",
            description="At `fetch.max_in_flight` for long: callers wait for a place; add preprocessor replicas.",
            queries=(Query(expr=total(series("media_fetches_in_flight"), "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Bytes fetched",
            unit="Bps",
            description="Bodies as they come over the wire. Near the node's network: more nodes, or smaller pictures.",
            queries=(Query(expr=total_rate("media_fetch_bytes_total")),),
        ),
        Panel(
            title="Redirects followed",
            unit="ops",
            description="Each one costs a connection. Near the number of fetches: callers should send the final URLs.",
            queries=(Query(expr=total_rate("media_fetch_redirects_total")),),
        ),
        Panel(
            title="Jobs of decode workers",
            unit="ops",
            description="Reading headers, decoding, making patches again. Flat while requests grow: all workers "
            "are busy; add preprocessor replicas or `decode_threads`.",
            queries=(Query(expr=total_rate("decode_jobs_total")),),
        ),
        Panel(
            title="Decode processes lost",
            unit="ops",
            thresholds=((0.001, "red"),),
            description="With `decode_isolation: process`. A picture that crashes or hangs its decoder ends that "
            "process and its own request only. More than a few: somebody tries; the refused requests have the tenant.",
            queries=(Query(expr=total_rate("decode_worker_losses_total", "cause"), legend="{{cause}}"),),
        ),
    ),
)

_REFUSED = Row(
    title="Refused media and uuids",
    panels=(
        Panel(
            title="Refused pictures and videos",
            unit="ops",
            description="Requests refused for one of their media, by the error code that the caller saw.",
            queries=(Query(expr=total_rate("media_failures_total", "code"), legend="{{code}}"),),
        ),
        Panel(
            title="Media uuids",
            unit="ops",
            description="rebound: a caller gave a known uuid other bytes. A mistake of theirs, not of a cache.",
            queries=(Query(expr=total_rate("uuid_bindings_total", "result"), legend="{{result}}"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="sightline-pictures",
    title="Sightline / Pictures",
    description="Preparation, cache tiers and vision encoder.",
    rows=(_MEDIA, _CACHES, _ENCODER, _TRANSFER, _READING, _REFUSED),
    variables=(DEPLOYMENT, REPLICA),
)
