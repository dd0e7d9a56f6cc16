"""An environment of a third party's, as `pip install` would leave it."""

from pathlib import Path


def install_environment(folder: Path, name: str, code: str, attribute: str = "Saying") -> None:
    """Have the environment under this name wherever `folder` is on the path."""
    (folder / f"{name}_package.py").write_text(code)
    about = folder / f"{name}_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[elastic.environments]\n{name} = {name}_package:{attribute}\n")
