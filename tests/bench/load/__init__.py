"""Load on an OpenAI-compatible server: what is asked (workload, prepare), asking (client, drive), figures of it."""
