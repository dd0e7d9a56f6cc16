"""Backs up what a server keeps, while it runs, and restores it into an empty home.

    backup.py save    --home DIR [--database URL] COPY
    backup.py restore --home DIR [--database URL] COPY

COPY is a directory. It holds the database (of SQLite a file, of PostgreSQL what `pg_dump` makes) and every file of the
home, journals as of one moment each. The database comes first: what a run does afterwards, its journal says.
Restore with server and runner stopped, at the path that the home had.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

from elastic.system.sqlite import open_sqlite

SQLITE, POSTGRESQL = "elastic.sqlite", "database.dump"
BESIDE = ("-wal", "-shm", "-journal")
DATA = ("uploads", "incoming", "projects")
"""What people have put there: whatever it is called, it is copied as it is, and links lead nowhere."""
LEFT_OUT = ("runner.lock", "control.sock")


def save(home: Path, database: str, copy: Path) -> None:
    copy.mkdir(mode=0o700, parents=True)
    if database:
        subprocess.run(
            ["pg_dump", "--format=custom", f"--file={copy / POSTGRESQL}", f"--dbname={database}"], check=True
        )
    else:
        _copy_sqlite(home / SQLITE, copy / SQLITE)
    for path in sorted(home.rglob("*")):
        place = copy / "home" / path.relative_to(home)
        if path.relative_to(home).parts[0] in DATA and not path.is_dir():
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # It was deleted meanwhile.
                shutil.copy2(path, place, follow_symlinks=False)
            continue
        if path.name in LEFT_OUT or path.name.endswith(BESIDE) or path == home / SQLITE:
            continue
        if path.is_dir():
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif path.is_file():
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.suffix == ".sqlite":
                _copy_sqlite(path, place)
            else:
                with contextlib.suppress(FileNotFoundError):  # A newer checkpoint has replaced it meanwhile.
                    shutil.copy2(path, place)


def restore(home: Path, database: str, copy: Path) -> None:
    if home.exists() and any(home.iterdir()):
        sys.exit(f"--home: {home} is not empty; move it away first")
    shutil.copytree(copy / "home", home, symlinks=True, dirs_exist_ok=True)
    if database:
        restored = ("--clean", "--if-exists", "--no-owner", "--single-transaction", f"--dbname={database}")
        subprocess.run(["pg_restore", *restored, str(copy / POSTGRESQL)], check=True)
    else:
        shutil.copy2(copy / SQLITE, home / SQLITE)


def _copy_sqlite(path: Path, place: Path) -> None:
    """As of one moment, whatever is written meanwhile."""
    source, target = open_sqlite(path, "ro"), open_sqlite(place, "rwc")
    try:
        source.backup(target)
    finally:
        source.close()
        target.close()
    shutil.copystat(path, place)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=("save", "restore"))
    options.add_argument("copy", type=Path)
    options.add_argument("--home", type=Path, required=True)
    options.add_argument("--database", default="", help="a PostgreSQL's URL; a file in the home unless given")
    chosen = options.parse_args()
    (save if chosen.what == "save" else restore)(chosen.home.resolve(), chosen.database, chosen.copy)


if __name__ == "__main__":
    main()
