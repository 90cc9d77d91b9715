"""The version, in one place: the build reads it from here."""

from __future__ import annotations

__version__ = "0.1.0"
RECORD_VERSION = 1
"""Version of the record of a cell for programs, `axon_nb/records/cell_result.schema.json`."""
