"""What a run's process gets of its project's secrets: variables of the project's own names, and vendors' credentials.

Programs read variables by thousands of names, and some of them run what such a variable names. So a project chooses
names with a prefix, or well-known ones. Vendors' credentials are typed, and become variables of the vendors' clients.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from elastic.config import ConfigProblem
from elastic.protocol.api import VENDORS

PREFIX = "SECRET_"
WELL_KNOWN = frozenset(
    {
        *("ANTHROPIC_API_KEY", "COHERE_API_KEY", "COMET_API_KEY", "DEEPSEEK_API_KEY", "FIREWORKS_API_KEY"),
        *("GEMINI_API_KEY", "GITHUB_TOKEN", "GOOGLE_API_KEY", "GROQ_API_KEY", "HF_TOKEN", "MISTRAL_API_KEY"),
        *("NEPTUNE_API_TOKEN", "OPENAI_API_KEY", "OPENROUTER_API_KEY", "SERPAPI_API_KEY", "TAVILY_API_KEY"),
        *("TOGETHER_API_KEY", "WANDB_API_KEY", "XAI_API_KEY"),
    }
)
"""Keys of services, which no program takes for anything else."""
_OWN = re.compile(rf"{PREFIX}[A-Z0-9_]{{1,57}}")
ALLOWED = f"{PREFIX} and what you like, or {', '.join(sorted(WELL_KNOWN))}"

_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "aws": {
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
        "region": "AWS_DEFAULT_REGION",
    },
    "modal": {"token_id": "MODAL_TOKEN_ID", "token_secret": "MODAL_TOKEN_SECRET", "environment": "MODAL_ENVIRONMENT"},
}
WITHOUT_FILES: Mapping[str, str] = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "BOTO_CONFIG": os.devnull,
    "MODAL_CONFIG_PATH": os.devnull,
}
"""Variables by which vendors' clients find neither the files of the server's user nor what its machine may do."""


def may_name(name: str) -> bool:
    """Return whether a project may have a secret of this name."""
    return name in WELL_KNOWN or _OWN.fullmatch(name) is not None


def variables_of(vendor: str, credentials: str) -> dict[str, str]:
    """Return the variables that the vendor's client reads, for credentials as they are kept."""
    kept: dict[str, str | None] = json.loads(credentials)
    return {_VARIABLES[vendor][field]: value for field, value in kept.items() if value}


def environment_of(opened: Mapping[str, str], user: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a run's process for its project's secrets, and which of them its children get, too.

    Processes of a project without a `user` of its own reach no vendor's files or metadata service.
    """
    own = {name: value for name, value in opened.items() if may_name(name)}
    found = dict(own)
    for vendor in VENDORS.keys() & opened.keys():
        found |= variables_of(vendor, opened[vendor])
    without = WITHOUT_FILES if user is None else {}
    return {**found, **without}, sorted({*own, *without})


def profiles_in(config: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield a fault for each provider whose credentials are those of a profile in a file."""
    providers = config.get("providers")
    for name, section in providers.items() if isinstance(providers, dict) else ():
        if isinstance(section, dict) and section.get("profile"):
            words = (
                "is a profile of the server's user; allowed for projects with a unix_user; else keep the credentials "
                f"as the project's (elastic secrets set-vendor {name})"
            )
            yield ConfigProblem(words, ("providers", name, "profile"))
