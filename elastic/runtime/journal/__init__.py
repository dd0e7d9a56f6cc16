"""The run's journal: every event, every token and every outcome, in one SQLite file for each incarnation of the run."""

from elastic.runtime.journal.forgetting import forget_former
from elastic.runtime.journal.frames import event_row, frame_row
from elastic.runtime.journal.reader import JournalReader, ShownJournal, open_journal, why_unreadable
from elastic.runtime.journal.records import (
    AGENTS,
    CONTINUES,
    INTERRUPTED,
    JOIN,
    NOT_SCORED,
    PUBLISHER,
    RELAY,
    RUNNING,
    TRACEBACK,
    UNEXPECTED,
    BookRow,
    CallRow,
    EvaluatedRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    MoveRow,
    NoteRow,
    PullRow,
    SampleRow,
    StateRow,
    StepRow,
    StepWeights,
    TrajectoryFilter,
    TrajectoryPlace,
    TrajectoryRow,
    TurnRow,
)
from elastic.runtime.journal.store import CONFIG, JOURNAL, SIMULATED, DirectoryStore, RunDirectory, RunStore, StoredRun
from elastic.runtime.journal.tables import JournalRecord
from elastic.runtime.journal.writer import SCHEMA_VERSION, JournalError, JournalWriter, NullJournal, SqliteJournal
