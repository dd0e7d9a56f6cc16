"""The API's routes, a module for each kind of resource."""

from fastapi import FastAPI

from elastic.server.routes import (
    audit,
    events,
    figures,
    health,
    keys,
    me,
    members,
    page,
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


def include(app: FastAPI) -> None:
    for module in (
        page,
        health,
        session,
        sign_in,
        me,
        projects,
        members,
        quotas,
        retention,
        secrets,
        uploads,
        keys,
        runs,
        events,
        figures,
        results,
        providers,
        webhooks,
        audit,
    ):
        app.include_router(module.router)
