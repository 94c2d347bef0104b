"""The language model's engine: memory, sequences, tokens, steps."""

from __future__ import annotations

from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import DEPLOYMENT, REPLICA, part_or_zero, rate, ratio, series, total, total_rate

_PROMPT = total(rate("prompt_tokens_total"))

_MEMORY = Row(
    title="Memory",
    panels=(
        Panel(
            title="KV blocks",
            stacked=True,
            runbook="Preemptions",
            description="used: held by sequences. cached: found by prefix, given up when needed. Free and cached gone "
            "means preemption is next.",
            queries=(Query(expr=total(series("kv_blocks"), "state"), legend="{{state}}"),),
        ),
        Panel(
            title="KV in use",
            unit="percentunit",
            max_value=1,
            thresholds=((0.9, "yellow"), (0.98, "red")),
            runbook="Preemptions",
            description="By replica. Near 1: add LM engine replicas, or lower max_num_seqs.",
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
            title="Embedding slots",
            stacked=True,
            description="used: sequences still need them. cached: hit for free. All used: pictures are deferred; give "
            "encoder_cache_size more.",
            queries=(Query(expr=total(series("embedding_slots"), "state"), legend="{{state}}"),),
        ),
    ),
)

_SEQUENCES = Row(
    title="Sequences",
    panels=(
        Panel(
            title="Running and waiting",
            stacked=True,
            runbook="Engine stuck",
            description="waiting with free KV: another budget is the limit, see Deferrals. Waiting and not one step: "
            "the engine is stuck.",
            queries=(Query(expr=total(series("scheduler_requests"), "state"), legend="{{state}}"),),
        ),
        Panel(
            title="Preemptions",
            unit="ops",
            runbook="Preemptions",
            description="Each one computes a sequence again. A few at peaks are fine; steady ones burn the GPU.",
            queries=(Query(expr=total_rate("preemptions_total"), legend="preemptions"),),
        ),
        Panel(
            title="Deferrals by budget",
            unit="ops",
            description="The budget that most often ends a step is the one to raise.",
            queries=(
                Query(
                    expr=total_rate("budget_rejections_total", "budget", where=('outcome="deferred"',)),
                    legend="{{budget}}",
                ),
            ),
        ),
        Panel(
            title="Longest stall",
            unit="s",
            thresholds=((30, "red"),),
            runbook="Starvation",
            description="For how long a replica has had work queued and scheduled nothing. Waiting for encodes counts.",
            queries=(Query(expr=f"max by (replica) ({series('scheduler_stalled_seconds')})", legend="{{replica}}"),),
        ),
    ),
)

_TOKENS = Row(
    title="Tokens and steps",
    panels=(
        Panel(
            title="Prompt tokens by source",
            unit="ops",
            stacked=True,
            description="computed: prefill work. cached: saved by a prefix hit.",
            queries=(Query(expr=total_rate("prompt_tokens_total", "source"), legend="{{source}}"),),
        ),
        Panel(
            title="Prefix hit ratio",
            unit="percentunit",
            max_value=1,
            description="A drop with the same traffic: sessions move between replicas, or the KV cache is too small.",
            queries=(
                Query(
                    expr=ratio(part_or_zero(total(rate("prompt_tokens_total", 'source="cached"')), _PROMPT), _PROMPT),
                    legend="cached",
                ),
            ),
        ),
        Panel(
            title="Generated tokens",
            unit="ops",
            description="Tokens a second. Flat while sequences wait: the engine is at its limit.",
            queries=(Query(expr=total_rate("generated_tokens_total"), legend="generated"),),
        ),
        Panel(
            title="Steps",
            unit="ops",
            runbook="Engine stuck",
            description="By replica. 0 with running sequences: stuck.",
            queries=(Query(expr=total_rate("engine_steps_total", "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Generated tokens per step",
            description="How well decoding is batched. 1 under load: sequences do not run together, see Deferrals.",
            queries=(
                Query(
                    expr=ratio(
                        total(rate("generated_tokens_total"), "replica"), total(rate("engine_steps_total"), "replica")
                    ),
                    legend="{{replica}}",
                ),
            ),
        ),
        Panel(
            title="Failed steps",
            unit="ops",
            thresholds=((0.001, "red"),),
            runbook="Engine step failures",
            description="Must be 0: the requests of such a step failed with 500. The log has the cause.",
            queries=(Query(expr=total_rate("engine_step_failures_total", "replica"), legend="{{replica}}"),),
        ),
    ),
)


def mean(family: str) -> str:
    return ratio(total(rate(f"{family}_sum")), total(rate(f"{family}_count")))


_LATENCY = Row(
    title="Inside the engine",
    panels=(
        Panel(
            title="Engine: time to first token, mean",
            unit="s",
            description="From the engine's queue to the first token, without the way there and back.",
            queries=(Query(expr=mean("engine_time_to_first_token_seconds"), legend="mean"),),
        ),
        Panel(
            title="Engine: time between tokens, mean",
            unit="s",
            description="Between two steps of one sequence. Clients see this and the stream's own delay.",
            queries=(Query(expr=mean("engine_inter_token_seconds"), legend="mean"),),
        ),
        Panel(
            title="Engine: seconds a second by stage",
            description="Where sequences spend their time; time with an encode under way counts as encode only.",
            queries=(Query(expr=total_rate("engine_stage_seconds_sum", "stage"), legend="{{stage}}"),),
        ),
        Panel(
            title="Encoder calls made again",
            unit="ops",
            description="The encoder was overloaded or lost a payload. Steady growth: look at the encoder's queue.",
            queries=(Query(expr=total_rate("encode_retries_total", "replica"), legend="{{replica}}"),),
        ),
    ),
)


DASHBOARD = Dashboard(
    uid="sightline-engine",
    title="Sightline / Engine",
    description="KV cache, embedding slots, sequences and steps of the LM engine.",
    rows=(_MEMORY, _SEQUENCES, _TOKENS, _LATENCY),
    variables=(DEPLOYMENT, REPLICA),
)
