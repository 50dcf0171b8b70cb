"""Endpoints that were deployed with the defaults of before keep them.

Settings that are the defaults are not stored, so that other defaults would change endpoints which nobody touched.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

BEFORE = {
    "idle": "fixed",
    "down_utilization": 30.0,
    "down_utilization_s": 600.0,
    "load_share_down": 60.0,
    "prewarm_cold_cost_s": 900.0,
}


def upgrade() -> None:
    """Write the defaults of before where nothing else is written."""
    endpoints = sa.table("endpoints", sa.column("endpoint_id", sa.Text()), sa.column("autoscale", sa.Text()))
    connection = op.get_bind()
    for endpoint_id, stored in connection.execute(sa.select(endpoints.c.endpoint_id, endpoints.c.autoscale)).all():
        kept = json.dumps(BEFORE | json.loads(stored))
        connection.execute(endpoints.update().where(endpoints.c.endpoint_id == endpoint_id).values(autoscale=kept))
