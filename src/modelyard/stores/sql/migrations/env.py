"""Run the migrations on the connection, and in the transaction, that ``migrate.py`` holds."""

from alembic import context

from modelyard.stores.sql.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
    transactional_ddl=False,  # the caller's transaction covers all of it
)
context.run_migrations()
