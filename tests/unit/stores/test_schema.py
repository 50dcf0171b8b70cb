"""A database made at once and one that was migrated step by step are the same; others are refused with a reason."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from modelyard.domain.endpoints import SOURCE, Autoscale, IdleTime, Tier
from modelyard.errors import StartupError
from modelyard.stores.sql import migrate, open_database, schema

MIGRATIONS = Path(migrate.__file__).parent / "migrations"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'migrated.sqlite'}")
    yield engine
    engine.dispose()


def definitions(file: Path) -> set[str]:
    """Return every table and index as SQLite was told it, without the spelling that differs."""
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT type, name, tbl_name FROM sqlite_master").fetchall()
        columns = [
            ("column", table, str(column[1:]))
            for kind, table, _ in rows
            if kind == "table"
            for column in database.execute(f"PRAGMA table_info('{table}')").fetchall()
        ]
        keys = [
            ("foreign key", table, str(key[2:]))
            for kind, table, _ in rows
            if kind == "table"
            for key in database.execute(f"PRAGMA foreign_key_list('{table}')").fetchall()
        ]
        indexes = [
            ("index", table, str(index[1:]))
            for kind, table, _ in rows
            if kind == "table"
            for index in database.execute(f"PRAGMA index_list('{table}')").fetchall()
        ]
    return {str(row) for row in [*rows, *columns, *keys, *indexes]}


def test_the_migrations_lead_to_the_tables_of_the_code(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        migrate.migrate(connection, None)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.HEAD


def test_a_fresh_database_is_what_the_migrations_make(engine: sa.Engine, tmp_path: Path) -> None:
    with engine.begin() as connection:
        migrate.migrate(connection, None)
    with sa.create_engine(f"sqlite:///{tmp_path / 'fresh.sqlite'}").begin() as connection:
        migrate.bring_up_to_date(connection)
    connection.engine.dispose()
    assert definitions(tmp_path / "fresh.sqlite") == definitions(tmp_path / "migrated.sqlite")


def test_the_newest_migration_is_the_one_that_fresh_databases_are_stamped_with() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == schema.HEAD


def test_opening_a_fresh_or_current_database_does_not_load_alembic(tmp_path: Path) -> None:
    program = (
        "import sys; from modelyard.stores.sql import open_database\n"
        "for _ in range(2): open_database(sys.argv[1], timeout_s=1)\n"
        "assert not any(name.startswith('alembic') for name in sys.modules), 'alembic was imported'\n"
    )
    url = f"sqlite:///{tmp_path / 'control.sqlite'}"
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_database_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'control.sqlite'}"
    file = tmp_path / "control.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('9999')")
        database.commit()
    with pytest.raises(StartupError, match="9999"):
        open_database(url, timeout_s=1)


def test_tables_without_a_revision_are_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "control.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE tenants (surprise TEXT)")
    with pytest.raises(StartupError, match="tenants"):
        open_database(f"sqlite:///{file}", timeout_s=1)
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("tenants",)]


@pytest.mark.parametrize("url", ["", "no url", "sqlite://", "sqlite:///:memory:", "nosuchdb://x/y"])
def test_what_cannot_be_opened_is_explained(url: str) -> None:
    with pytest.raises(StartupError):
        open_database(url, timeout_s=0.1)


def test_a_file_that_is_no_database_is_explained_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "control.sqlite"
    file.write_bytes(b"this is not a database, but it may be somebody's only copy of a poem" * 100)
    with pytest.raises(StartupError, match="not a database"):
        open_database(f"sqlite:///{file}", timeout_s=0.1)
    assert file.read_bytes().startswith(b"this is not a database")


def test_a_folder_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        open_database(f"sqlite:///{tmp_path / 'nowhere' / 'control.sqlite'}", timeout_s=0.1)


def test_a_locked_database_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "control.sqlite"
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StartupError, match="locked"):
            open_database(f"sqlite:///{file}", timeout_s=0.1)


def test_what_was_spent_before_the_daily_sums_is_taken_over(engine: sa.Engine) -> None:
    """A key's quota must not begin anew with an upgrade."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    noon = 1_795_953_600
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for hour, model in ((noon, "a"), (noon, "b"), (noon + 3600, "a"), (noon + 86_400, "a")):
            connection.execute(
                sa.text("INSERT INTO usage_hourly VALUES (:hour, 't', 'k', :model, 'success', 1, 10, 4, 5, 7)"),
                {"hour": hour, "model": model},
            )
        connection.execute(sa.text("INSERT INTO tenants VALUES ('t', 'acme', 1, '{}', false)"))
        command.upgrade(config, "0002")
        found = connection.execute(sa.text("SELECT * FROM usage_daily ORDER BY day")).fetchall()
        day = noon // 86_400
        assert [tuple(row) for row in found] == [("t", "k", day, "", 45, 21), ("t", "k", day + 1, "", 15, 7)]
        tenant = connection.execute(sa.text("SELECT plan, weight FROM tenants")).one()
        assert tuple(tenant) == ("standard", 1.0)
        # A release before this one does not name the new columns when it writes.
        connection.execute(
            sa.text(
                "INSERT INTO tenants (tenant_id, name, created_at, limits, is_suspended) VALUES ('u','u',1,'{}',false)"
            )
        )


def test_roll_ups_of_what_was_used_before_are_made_from_the_rows(engine: sa.Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    noon = 1_795_953_600
    columns = (
        "request_id, endpoint_id, customer_id, api_key_id, model_name, model_id, replica_id, route, is_stream, "
        "prompt_tokens, cached_tokens, completion_tokens, total_tokens, cost_nanousd, status, http_status, error_code, "
        "latency_ms, attempts, is_estimated, created_at, hour, settled_at, units_micro, unit"
    )
    rows = [
        ("r1", noon + 5, 0, ""),
        ("r2", noon + 9, 0, ""),
        ("r3", noon + 9, 2_500_000, "seconds"),
        ("r4", noon + 50_000, 0, ""),
    ]
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0008")
        for request_id, at, micro, unit in rows:
            connection.execute(
                sa.text(
                    f"INSERT INTO inference_requests ({columns}) VALUES (:id, 'ep', 't', 'k', 'smol', 'ver', 'rep', "
                    "'/v1/x', true, 10, 4, 5, 15, 7, 'success', 200, '', 1.5, 1, false, :at, :hour, :at, :micro, :unit)"
                ),
                {"id": request_id, "at": at, "hour": at - at % 3600, "micro": micro, "unit": unit},
            )
        command.upgrade(config, "0011")

        def sums(table: str) -> list[tuple[object, ...]]:
            query = (
                f"SELECT period, unit, requests, prompt_tokens, units_micro, cost_nanousd FROM {table} ORDER BY 1, 2"
            )
            return [tuple(row) for row in connection.execute(sa.text(query))]

        later, day = noon + 50_000 - (noon + 50_000) % 3600, noon - noon % 86_400
        hours = [(noon, "", 2, 20, 0, 14), (noon, "seconds", 1, 10, 2_500_000, 7), (later, "", 1, 10, 0, 7)]
        days = [(day, *row[1:]) for row in hours[:2]] + [(day + 86_400, *hours[2][1:])]
        november = 1_793_491_200
        assert sums("usage_rollup_hourly") == sums("usage_rollup_platform_hourly") == hours
        assert sums("usage_rollup_daily") == sums("usage_rollup_platform_daily") == days
        assert sums("usage_rollup_monthly") == [
            (november, "", 3, 30, 0, 21),
            (november, "seconds", 1, 10, 2_500_000, 7),
        ]
        key = "SELECT customer_id, api_key_id, model_name, endpoint_id, model_id, route, status, is_batch"
        found = connection.execute(sa.text(f"{key} FROM usage_rollup_daily")).fetchall()
        assert {tuple(row) for row in found} == {("t", "k", "smol", "ep", "ver", "/v1/x", "success", 0)}


def test_what_models_cost_before_counts_for_budgets_of_models(engine: sa.Engine) -> None:
    """Like the quota of a key, the budget of a model does not begin anew with an upgrade."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    november = 1_793_491_200
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0014")
        for model, version, nano in (("a", "v1", 7), ("a", "v2", 5), ("b", "v1", 3), ("free", "v1", 0)):
            connection.execute(
                sa.text(
                    "INSERT INTO usage_rollup_monthly VALUES (:period, 't', 'k', :model, 'ep', :version, '/v1/x', "
                    "'success', false, '', 1, 10, 0, 5, 0, 0, 0, 0, :nano)"
                ),
                {"period": november, "model": model, "version": version, "nano": nano},
            )
        command.upgrade(config, "0015")
        found = connection.execute(sa.text("SELECT * FROM usage_model_months ORDER BY model_name")).fetchall()
        month = november // 86_400
        assert [tuple(row) for row in found] == [("t", "k", month, "a", "", 12), ("t", "k", month, "b", "", 3)]


def test_endpoints_of_before_keep_the_defaults_that_they_were_deployed_with(engine: sa.Engine) -> None:
    """What is a default is not stored, so that other defaults would change endpoints that nobody touched."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0015")
        connection.execute(
            sa.text(
                "INSERT INTO tenants (tenant_id, name, created_at, limits, is_suspended) VALUES ('t','t',1,'{}',false)"
            )
        )
        for name, stored in (("plain", "{}"), ("set", '{"tier":"hot","idle":"learned","down_utilization":45.0}')):
            connection.execute(
                sa.text(
                    "INSERT INTO endpoints (endpoint_id, owner_id, name, status, min_replicas, max_replicas, "
                    "scale_to_zero, idle_s, scaling_metric, scaling_target, is_shared, is_deleted, progress, failure, "
                    "created_at, autoscale) VALUES (:name, 't', :name, 'running', 1, 1, true, 300, 'queue_depth', 70, "
                    "false, false, '{}', '', 1, :stored)"
                ),
                {"name": name, "stored": stored},
            )
        command.upgrade(config, "0017")
        rows = connection.execute(sa.text("SELECT endpoint_id, autoscale FROM endpoints")).fetchall()
    found = {name: msgspec.json.decode(stored, type=Autoscale) for name, stored in rows}
    assert found["plain"] == SOURCE
    assert found["set"] == msgspec.structs.replace(SOURCE, tier=Tier.HOT, idle=IdleTime.LEARNED, down_utilization=45.0)
