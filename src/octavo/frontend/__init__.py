"""What users touch: the offline API, the HTTP server, text in and out. Never imports core or worker, and no torch."""
