"""How many vision encoders and LM replicas a trace needs: from measured rates to splits of GPUs. No torch, no Ray.

model folder ──shape──▶ sizes ─┐
rates (measured) ──────────────┼─▶ stage_times ──▶ estimate (arithmetic) ─┐
trace ──workload──▶ demand ────┘         └───────▶ replay (scheduler)  ───┼─▶ choose ──▶ report
"""
