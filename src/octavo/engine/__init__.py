"""The composition root: the only place that knows core, executor and worker at once, and hands frontends a finished engine."""
