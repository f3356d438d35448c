"""The version whose interface this stands for, marked as Octavo's: programs compare it."""

from octavo import __version__ as _octavo_version

__version__ = f"0.33.0+octavo.{_octavo_version}"
__version_tuple__ = (0, 33, 0)
