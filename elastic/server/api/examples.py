"""Examples of the bodies in the API's description: made of their schemas, with what a field of that name would have."""

from collections.abc import Mapping
from typing import Any

_ULID = "01JD3K5T7WQ8M2N4P6R8S0V2X4"
_AT = "2026-11-22T08:00:00Z"
IDS = {
    "run": f"run_{_ULID}",
    "project": f"proj_{_ULID}",
    "key": f"key_{_ULID}",
    "job": f"job_{_ULID}",
    "member": f"mem_{_ULID}",
    "upload": f"upl_{_ULID}",
    "webhook": f"hook_{_ULID}",
    "webhook_delivery": f"msg_{_ULID}",
    "audit_entry": f"aud_{_ULID}",
    "trajectory": "s41g3m2",
    "checkpoint": "00000040",
    "worker": "spot-l9-0",
    "lease": "spot-l9",
    "provider": "spot-replay",
    "pool": "lab",
    "secret": "HF_TOKEN",
}
"""What each kind of object has as its id, and others name it by."""
_CONFIG = {"run": {"name": "frozenlake", "steps": 100}, "model": {"checkpoint": ".cache/frozenlake-base"}}
FIELDS: Mapping[str, Any] = {
    **{kind: IDS[kind] for kind in ("run", "project", "key", "webhook", "upload", "lease", "pool")},
    "created_by": IDS["key"],
    "actor": IDS["key"],
    "request_id": f"req_{_ULID}",
    "name": "frozenlake",
    "Project.name": "agents",
    "NewProject.name": "agents",
    "ProjectChange.name": "agents-2",
    "SessionChange.project": "agents",
    "ProjectMember.name": "Ada",
    "email": "ada@example.com",
    "NewProject.unix_user": "elastic-agents",
    "role": "runner",
    "hint": "elastic_3f9a…",
    "CreatedKey.secret": "elastic_3f9a…",
    "CreatedWebhook.secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
    "SecretValue.value": "**********",
    "access_key_id": "AKIAIOSFODNN7EXAMPLE",
    "secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "token_id": "ak-abc123",
    "token_secret": "as-EXAMPLE",
    "config": _CONFIG,
    "JobSubmission.config": {**_CONFIG, "job": {"slo": 1.5, "rollout_memory_gb": 2.0, "train_memory_gb": 4.0}},
    "provider": "spot",
    "providers": ["serving", "spot"],
    "JobSubmission.providers": ["spot"],
    "labels": {"team": "agents"},
    "caps": {"spot": 2},
    "Condition.type": "CapacityAvailable",
    "Condition.status": "False",
    "Condition.reason": "Preempted",
    "message": "its workers were taken away; the trainer goes on alone",
    "HostedRun.phase": "running",
    "HostedRunDetail.phase": "running",
    "RunFigures.phase": "running",
    "RunFigures.providers": {"spot": {"ready": 2, "booting": 1, "tokens": 40312, "usd": 0.31, "usd_per_hour": 5.32}},
    "removes": ["checkpoints", "logs"],
    "group": "group-1",
    "HostedTrajectory.group": "s41g3",
    "HostedTrajectoryDetail.group": "s41g3",
    "HostedTrajectoryDetail.text": "^SFD",
    "HostedLease.cause": "preempted",
    "accounts_s": {"decode": 31.2, "idle": 2.0},
    "workers": [IDS["worker"]],
    "HostedJob.state": "running",
    "HostedJob.reason": "its residents are up",
    "scope": IDS["project"],
    "path": "model.safetensors",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "url": "https://example.com/elastic",
    "Listed.url": "/v1/…",
    "events": ["run.finished", "run.failed"],
    "WebhookDelivery.type": "run.failed",
    "answer": "status 200",
    "action": "runs:write",
    "actions": ["projects:read", "runs:read", "runs:write"],
    "resource": f"/v1/runs/{IDS['run']}",
    "AuditEntry.status": 201,
    "ServerInfo.version": "0.1.0",
}
"""The value of a field, by its name or by `SCHEMA.name`, which goes first."""
LEFT_OUT = ("project", "sha256")
"""Fields that are shown only where they must be there."""
_OF_TYPE = {"integer": 1, "number": 1.0, "boolean": False, "string": ""}


def example(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str = "") -> Any:
    """Return an example of a JSON schema, whose references are to `schemas`. What may be left out, or be null, is where
    no field of its name has a value."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return example(schemas[name], schemas, name)
    if "anyOf" in schema:
        nullable = {"type": "null"} in schema["anyOf"] and "$ref" not in schema["anyOf"][0]
        return None if nullable else example(schema["anyOf"][0], schemas)
    for key in ("const", "enum"):
        if key in schema:
            return schema[key] if key == "const" else schema[key][0]
    if schema.get("type") == "array":
        return [one for one in [example(schema["items"], schemas)] if one not in ("", {})]
    if "properties" in schema:
        return _object(schema, schemas, "Listed" if name.startswith("Listed_") else name)
    if schema.get("type") == "object":
        values = schema.get("additionalProperties", True)
        return {} if isinstance(values, bool) else {"spot": example(values, schemas)}
    return _OF_TYPE.get(schema.get("type", ""))


def _object(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind = schema["properties"].get("object", {}).get("const")
    required = schema.get("required", ())
    for field, said in schema["properties"].items():
        known = FIELDS.get(f"{name}.{field}", FIELDS.get(field))
        if field == "id" and kind in IDS:
            found[field] = IDS[kind]
        elif field in LEFT_OUT and field not in required:
            continue
        elif known is not None and isinstance(known, list) >= (said.get("type") == "array"):
            found[field] = known
        elif field == "at" or (field.endswith(("_at", "Time")) and said.get("type") == "string"):
            found[field] = _AT
        elif field in required or "const" in said:
            found[field] = example(said, schemas)
    return found
