"""The store's tables as each revision had them, in SQL: from these, databases of earlier versions go forward.

    python -m tests.server.kept_tables REVISION

writes those of today. Once a revision has been released, its tables are not written again.
"""

import sys
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from elastic.server.store.tables import metadata

DIALECTS: dict[str, sa.Dialect] = {"postgresql": postgresql.dialect(), "sqlite": sqlite.dialect()}
KEPT = Path(__file__).parent / "tables"
BETWEEN = ";\n"


def tables_of(revision: str, dialect: str) -> Path:
    """The file of a revision's tables for one of the `DIALECTS`."""
    return KEPT / f"{revision}.{dialect}.sql"


def revisions() -> list[str]:
    """The revisions whose tables are kept, oldest first."""
    return sorted({path.name.partition(".")[0] for path in KEPT.glob("*.sql")})


def make_tables(connection: sa.Connection, revision: str) -> None:
    """Have an empty database be one of this revision."""
    said = tables_of(revision, connection.dialect.name).read_text(encoding="utf-8")
    for statement in said.removesuffix(BETWEEN).split(BETWEEN):
        connection.exec_driver_sql(statement)
    connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
    connection.execute(sa.text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})


def _statements(dialect: sa.Dialect) -> list[str]:
    tables = metadata.sorted_tables
    indexes = [index for table in tables for index in sorted(table.indexes, key=lambda index: str(index.name))]
    made = [*map(CreateTable, tables), *map(CreateIndex, indexes)]
    return ["\n".join(line.rstrip() for line in str(one.compile(dialect=dialect)).strip().split("\n")) for one in made]


if __name__ == "__main__":
    for name, dialect in DIALECTS.items():
        statements = [f"{statement}{BETWEEN}" for statement in _statements(dialect)]
        tables_of(sys.argv[1], name).write_text("".join(statements), encoding="utf-8")
