"""A table at the end: what ran, by file."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            file = report.nodeid.split("::")[0]
            counts[file][outcome] += 1
            seconds[file] += getattr(report, "duration", 0.0)
    if not any(of["passed"] + of["failed"] for file, of in counts.items() if file.startswith("tests/gpu/")):
        return  # No GPU: these files are one folder of many.
    terminalreporter.write_sep("-", "by file")
    terminalreporter.write_line(f"{'':44}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for file, of in sorted(counts.items()):
        terminalreporter.write_line(f"{file:44}{of['passed']:8}{of['failed'] + of['error']:8}{of['skipped']:9}{seconds[file]:9.1f}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures by name as they come: a run that is cut off has no summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})", flush=True)
