"""Dashboards as code: `python -m grafana.generate` writes dashboards/*.json and the metrics table of README.md."""
