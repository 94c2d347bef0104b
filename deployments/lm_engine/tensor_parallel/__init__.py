"""One language model over several devices: every rank holds a share of each layer's heads and MLP columns.

    rank 0      scheduler ─plan─▶ LeaderRunner ──┬─ run its shard ─▶ logits ─▶ sampler
                                                 │        ║ two all-reduces a layer, one gather of logits
    rank 1..    ◀── control channel, plan bytes ─┴─ run their shards, sample nothing

`shards.py` says who holds what, `layers.py` puts the collectives into the layers, `group.py` has the collectives,
`channel.py` the control sockets, `wire.py` what crosses them, `leader.py` and `worker.py` the two ends.
"""
