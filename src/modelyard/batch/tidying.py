"""What killed processes leave of batches that are over: folders, and charges of lines that nobody runs again."""

import asyncio
import logging
import shutil
from contextlib import suppress
from pathlib import Path

from modelyard.batch.gateways import pause
from modelyard.clock import Clock
from modelyard.stores import BatchStore, StoreUnavailableError

TIDY_S = 60.0
CHARGES_KEPT_S = 172_800.0
"""Time that charges of a batch are remembered after its end: longer than anything of it is still on its way."""

_log = logging.getLogger(__name__)


async def tidy(store: BatchStore, folder: Path, clock: Clock, stop: asyncio.Event) -> None:
    """Tidy up now, and every so often until ``stop`` is set."""
    while not stop.is_set():
        with suppress(StoreUnavailableError):
            for left in await asyncio.to_thread(lambda: sorted(folder.glob("batch_*"))):
                batch = await store.batch(left.name, tenant_id=None)
                # Its row comes before its folder: what has none, never had one.
                if batch is None or batch.status.is_over:
                    _log.info("removing what is left of %s", left.name)
                    await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
            await store.forget_charges(before=clock.unix_s() - CHARGES_KEPT_S)
        await pause(TIDY_S, stop)
