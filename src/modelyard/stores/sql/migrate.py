"""Bring a database to the schema of this release.

A fresh database is created straight from ``schema.py`` and stamped, and one at
the newest revision is left alone: neither imports Alembic, which would double
the start-up time. A test proves that the migrations lead to the same schema.
All of it is one transaction; another process that opens the same fresh
database waits and then finds it done.
"""

from pathlib import Path

import sqlalchemy as sa

from modelyard.errors import StartupError
from modelyard.stores.sql import schema


def bring_up_to_date(connection: sa.Connection) -> None:
    """Create or migrate, within the caller's transaction.

    Raises:
        StartupError: the database is of a newer release, or not ours.
    """
    present = set(sa.inspect(connection).get_table_names())
    if schema.alembic_version.name not in present:
        if ours := sorted(present & schema.metadata.tables.keys()):
            raise StartupError(
                f"The database has tables of ours ({', '.join(ours)}) and no revision; "
                "it is damaged or belongs to another program. Restore a backup, or use another 'control.database_url'."
            )
        _create(connection)
        return
    revision = connection.execute(sa.select(schema.alembic_version.c.version_num)).scalar()
    if revision != schema.HEAD:
        migrate(connection, revision)


def check_readable(connection: sa.Connection) -> None:
    """Make sure that the tables are those of this release; changes nothing.

    Raises:
        StartupError: they are not.
    """
    if schema.alembic_version.name not in sa.inspect(connection).get_table_names():
        raise StartupError("The database has no tables of ours: no platform was started on it yet.")
    revision = connection.execute(sa.select(schema.alembic_version.c.version_num)).scalar()
    if revision != schema.HEAD:
        raise StartupError(
            f"The database is at revision '{revision}', this release reads '{schema.HEAD}'. "
            "Use the release that the platform runs, or start the platform with this one first."
        )


def _create(connection: sa.Connection) -> None:
    schema.metadata.create_all(connection, checkfirst=False)
    schema.alembic_version.create(connection)
    connection.execute(sa.insert(schema.alembic_version).values(version_num=schema.HEAD))


def migrate(connection: sa.Connection, revision: str | None) -> None:
    """Run Alembic from ``revision`` (None: an empty database) to the newest.

    Raises:
        StartupError: the stored revision is unknown here, so a newer release wrote it.
    """
    # Imported here: only an upgrade needs it, and it costs 0.1 s of CPU.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise StartupError(
            f"The database is at revision '{revision}', which this release does not know. "
            "Start the release that wrote it, or restore a backup of before the upgrade."
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
