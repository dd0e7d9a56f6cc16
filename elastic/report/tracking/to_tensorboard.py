"""TensorBoard: event files below the run's directory.

A row is one record of an event file, whose checksum tells a torn one. So what is there is read off the files, and each
row is there whole or not at all, whatever dies.
"""
# It is installed beside elastic by those who use it.
# pyright: reportMissingImports=false

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from elastic.report.tracking.delivery import TrackedRow, TrackedRun, TrackedSample

MARK = "elastic/step"
"""The figure that each row has, by which rows are told from what else stands in event files."""
TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


class TensorboardLogger:
    """One event file for each process that has written rows."""

    def __init__(self, run: TrackedRun) -> None:
        self._directory = run.directory
        self._writer: EventFileWriter | None = None

    def open(self) -> set[int]:
        there = {step for path in sorted(self._directory.glob("events.out.tfevents.*")) for step in _steps(path)}
        self._writer = EventFileWriter(str(self._directory), max_queue_size=1)
        return there

    def write(self, row: TrackedRow) -> None:
        assert self._writer is not None
        values = [Summary.Value(tag=name, simple_value=figure) for name, figure in row.figures.items()]
        values.append(Summary.Value(tag=MARK, simple_value=row.step))
        values += [_text(place, sample) for place, sample in enumerate(row.samples)]
        self._writer.add_event(Event(step=row.step, wall_time=row.at_s, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _steps(path: Path) -> list[int]:
    """The steps of an event file's whole rows."""
    events = (Event.FromString(record) for record in RawEventFileLoader(str(path)).Load())
    return [event.step for event in events if any(value.tag == MARK for value in event.summary.value)]


def _text(place: int, sample: TrackedSample) -> Summary.Value:
    messages = "\n\n".join(f"**{one['role']}**\n\n{one['content']}" for one in sample.messages)
    words = f"`{sample.trajectory}`, reward {json.dumps(sample.reward)}\n\n{messages}"
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[words.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=f"samples/{place}", metadata=TEXT, tensor=tensor)
