"""What Elastic deploys to Modal: one app, its image, and the version by which a run knows that it fits.

Modal imports this module where the app is deployed, and once more in every container. It needs the extra `modal`.
"""

import importlib
import importlib.metadata
import os
import re
from typing import Any

from elastic.system.modal import (
    APP,
    APP_VARIABLE,
    MODULES_VARIABLE,
    PACKAGES_VARIABLE,
    SOURCES,
    VERSION_TAG,
    version,
)

EXTRAS = ("train", "modal", "vllm")
PYTHON_VERSION = "3.12"
SOURCES_AT = "/root"
"""Where Modal puts sources: first on a container's path."""

modal: Any = importlib.import_module("modal")


def _image() -> Any:
    """Elastic's requirements with the extras that containers need, and its sources as they are here."""
    if not modal.is_local():
        return modal.Image.debian_slim()
    distribution = importlib.metadata.distribution("elastic-rl")
    further = os.environ.get(PACKAGES_VARIABLE, "").split()
    image = modal.Image.debian_slim(python_version=PYTHON_VERSION).pip_install(*_requirements(distribution), *further)
    modules = os.environ.get(MODULES_VARIABLE, "").split()
    image = image.add_local_python_source(*SOURCES, *modules)
    # Its entry points: which engines, environments and rewards are installed.
    metadata = next(file for file in distribution.files or () if file.name == "entry_points.txt").locate()
    folder = os.path.dirname(metadata)
    return image.add_local_dir(folder, f"{SOURCES_AT}/{os.path.basename(folder)}")


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    """Those of no extra and of `EXTRAS`; what is for other platforms is left out by pip."""
    found: list[str] = []
    for line in distribution.requires or ():
        requirement, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", condition)
        if extra is None or extra[1] in EXTRAS:
            found.append(requirement.strip())
    return found


_tags = {VERSION_TAG: version()} if modal.is_local() else {}
app = modal.App(os.environ.get(APP_VARIABLE, APP), tags=_tags, include_source=False)
image = _image()
