"""One module a dashboard; each exports `DASHBOARD`."""
