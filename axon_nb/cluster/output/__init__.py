"""Labelled, merged and bounded output of one cell on many ranks."""

from __future__ import annotations

from axon_nb.cluster.output.cell_output import CellOutput
from axon_nb.cluster.output.sinks import NotebookSink, RecordingSink, Sink

__all__ = ["CellOutput", "NotebookSink", "RecordingSink", "Sink"]
