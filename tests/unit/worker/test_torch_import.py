"""Modules are imported beside what goes on; of one that cannot be had it is said why."""

from __future__ import annotations

import sys

import pytest

from octavo.worker.torch_import import TorchMissing, import_beside


def test_the_module_is_there_once_the_future_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_beside("colorsys").result(timeout=60)
    assert "colorsys" in sys.modules


def test_one_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    failed = import_beside("octavo.no_such_module")
    with pytest.raises(TorchMissing, match=r"ModuleNotFoundError: No module named 'octavo.no_such_module'.*Reinstall torch"):
        failed.result(timeout=60)
    (record,) = caplog.records
    assert "requests that want logprobs, penalties or biases fail" in record.getMessage()
