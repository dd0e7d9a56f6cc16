"""The API's routes, a module for each kind of resource."""

from starlette.routing import BaseRoute

from elastic.server.api.routes import (
    audit,
    changes,
    events,
    figures,
    health,
    job_streams,
    keys,
    me,
    members,
    page,
    pools,
    projects,
    providers,
    quotas,
    results,
    retention,
    runs,
    secrets,
    session,
    sign_in,
    uploads,
    webhooks,
)

_MODULES = (
    runs,
    changes,
    events,
    figures,
    results,
    me,
    page,
    health,
    session,
    sign_in,
    projects,
    members,
    quotas,
    retention,
    secrets,
    uploads,
    keys,
    providers,
    pools,
    job_streams,
    webhooks,
    audit,
)
"""The most requested routes come first: a request is compared with one route after the other."""


def all_routes() -> list[BaseRoute]:
    """Every route, ready to serve: each was built as its module was imported.

    `include_router` would build them once more for each application, and only as the first request comes: while others
    wait for seconds, and inside `warnings.catch_warnings`, which is not for two threads at a time.
    """
    return [route for module in _MODULES for route in module.router.routes]
