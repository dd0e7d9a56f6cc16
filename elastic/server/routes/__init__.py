"""The API's routes, a module for each kind of resource."""

from fastapi import FastAPI

from elastic.server.routes import audit, events, health, keys, projects, providers, results, runs


def include(app: FastAPI) -> None:
    for module in (health, projects, keys, runs, events, results, providers, audit):
        app.include_router(module.router)
