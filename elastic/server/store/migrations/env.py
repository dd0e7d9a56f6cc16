"""Alembic's entry: runs the revisions on the connection that `migrate` hands over."""

from alembic import context

from elastic.server.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
