"""Benchmarks, each a script: `python benchmarks/NAME.py --quick`. Modules with names that begin with `_` are shared."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# A script's own directory comes first on the path, where `providers.py` would hide the package of that name. The
# root does: whatever else is installed, `tests` are these.
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() not in (HERE, ROOT))]
