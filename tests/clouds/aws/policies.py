"""What an IAM policy allows: as much of AWS's evaluation as the policies of `infra/aws` use."""

import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

POLICIES = Path(__file__).parents[3] / "infra" / "aws" / "policies"
NAMES = {
    "region": "us-east-1",
    "account": "123456789012",
    "runs": "lake",
    "bucket": "weights",
    "template": "lt-0123456789abcdef0",
    "queue_arn": "arn:aws:sqs:us-east-1:123456789012:elastic-lake-notices",
    "worker": "elastic-lake-worker",
}


def policy(name: str) -> dict[str, Any]:
    """As Terraform's `templatefile` would render it."""
    return json.loads(Template((POLICIES / f"{name}.json").read_text()).substitute(NAMES))


def actions(document: Mapping[str, Any]) -> set[str]:
    """Those that it allows, of whatever."""
    allowed = (statement for statement in document["Statement"] if statement["Effect"] == "Allow")
    return {action for statement in allowed for action in _list(statement["Action"])}


def allows(document: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Whether a request may be made; `context` has the keys that AWS knows of it, and no others."""
    effects = {
        statement["Effect"] for statement in document["Statement"] if _is_of(statement, action, resource, context)
    }
    return effects == {"Allow"}


def _is_of(statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    assert statement.keys() <= {"Sid", "Effect", "Action", "Resource", "Condition"}
    return (
        action in _list(statement["Action"])
        and any(fnmatch.fnmatchcase(resource, pattern) for pattern in _list(statement["Resource"]))
        and _met(statement.get("Condition", {}), context)
    )


def _met(conditions: Mapping[str, Mapping[str, Any]], context: Mapping[str, str]) -> bool:
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            found = context.get(key)
            values = [_filled(value, context) for value in _list(wanted)]
            match operator:
                case "StringEquals":
                    met = found in values
                case "StringLike":
                    met = found is not None and any(fnmatch.fnmatchcase(found, value) for value in values if value)
                case "StringNotLike":  # Met by what is not there, too.
                    met = found is None or not any(fnmatch.fnmatchcase(found, value) for value in values if value)
                case _:
                    raise AssertionError(f"condition {operator}: not known here")
            if not met:
                return False
    return True


def _filled(value: str, context: Mapping[str, str]) -> str:
    """A policy's own variables; one that nobody knows matches nothing."""
    names = re.findall(r"\$\{([^}]+)\}", value)
    if any(name not in context for name in names):
        return ""
    return re.sub(r"\$\{([^}]+)\}", lambda found: context[found[1]], value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
