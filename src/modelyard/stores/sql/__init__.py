"""Control state and the ledger in a SQL database: SQLite or Postgres, one code path (SQLAlchemy Core, Alembic).

``database.py`` holds the connection and its threads, ``schema.py`` the tables,
``migrate.py`` their change over time, ``mapping.py`` nouns to rows and back,
``control.py``, ``leader.py``, ``usage.py``, ``requests.py``, ``uploads.py``, ``files.py``, ``batches.py``,
``events.py``, ``webhooks.py``, ``books.py`` and ``billing/`` the contracts.
"""

from modelyard.stores.sql.batches import SqlBatchStore
from modelyard.stores.sql.billing import SqlBillingStore
from modelyard.stores.sql.books import SqlBookStore
from modelyard.stores.sql.control import SqlControlStore
from modelyard.stores.sql.database import Database, open_database, open_to_read
from modelyard.stores.sql.events import SqlEventStore
from modelyard.stores.sql.files import SqlFileStore
from modelyard.stores.sql.leader import SqlLeaderStore
from modelyard.stores.sql.requests import SqlRequestStore
from modelyard.stores.sql.uploads import SqlUploadStore
from modelyard.stores.sql.usage import SqlUsageStore
from modelyard.stores.sql.webhooks import SqlWebhookStore

__all__ = [
    "Database",
    "SqlBatchStore",
    "SqlBillingStore",
    "SqlBookStore",
    "SqlControlStore",
    "SqlEventStore",
    "SqlFileStore",
    "SqlLeaderStore",
    "SqlRequestStore",
    "SqlUploadStore",
    "SqlUsageStore",
    "SqlWebhookStore",
    "open_database",
    "open_to_read",
]
