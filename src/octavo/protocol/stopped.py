"""Whether a process that we started has been stopped by a signal: it neither answers nor ends, and whoever waits for it waits for ever."""

from __future__ import annotations

import time

STOPPED_SECONDS = 5.0
"""So long it may be: programs that ration processor time stop others for moments."""
LOOK_SECONDS = 1.0
LONGEST_PAUSE = 2.0
"""Between two looks, as far as it counts: whoever looks may have been stopped as well."""


def is_stopped(pid: int) -> bool:
    """By a signal; a debugger's stop does not count."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class StoppedClock:
    """For how long a process has been stopped. To be asked now and then; it looks once a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped = False
        self._seconds = 0.0
        self._looked = 0.0

    def seconds(self) -> float:
        """0.0 when it is not."""
        now = time.monotonic()
        pause = now - self._looked
        if pause >= LOOK_SECONDS:
            before, self._stopped, self._looked = self._stopped, is_stopped(self._pid), now
            self._seconds = self._seconds + min(pause, LONGEST_PAUSE) if before and self._stopped else 0.0
        return self._seconds
