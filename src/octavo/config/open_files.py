"""The limit that a user sets on a process's open files (`ulimit -n`): below what a start needs, libraries end the process where they get none.

Importing it costs nothing.
"""

from __future__ import annotations

from octavo.errors import ConfigError

LEAST_FILES = 64
"""A frontend and its engine have some thirty open each before the first client."""


def check() -> None:
    """Raise the limit to the least that is needed, where the system lets us. To be called before anything is opened.

    Raises:
        ConfigError: it is lower, and cannot be raised.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise ConfigError(
            f"Each process may have {hard} files open at most (ulimit -n), and Octavo needs {LEAST_FILES}, with one more for each client: "
            f"raise that limit (ulimit -n 1024)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))
