"""Forget searches that ended long ago: their entries in the queue, their events and the logs of their trials.

Studies stay: what they measured answers and shortens later searches.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from datetime import timedelta

from autotune.core.errors import StorageError
from autotune.service.searches import Searches
from autotune.tuning.run import log_folder

_PAUSE_SECONDS = 3600.0

log = logging.getLogger("autotune.service")


async def forget_hourly(searches: Searches, keep: timedelta) -> None:
    """Forget what has become old, at once and every hour."""
    while True:
        try:
            await asyncio.to_thread(forget, searches, keep)
        except StorageError as error:
            log.warning("old searches cannot be forgotten now: %s", error)
        except Exception:
            # Nobody waits for this task: without this, one error would end it unseen.
            log.exception("old searches cannot be forgotten now")
        await asyncio.sleep(_PAUSE_SECONDS)


def forget(searches: Searches, keep: timedelta) -> int:
    """Forget the searches that ended longer ago; return how many.

    The logs of a study go with the last of its searches.
    """
    queue, count = searches.store.queue, 0
    while gone := queue.forget(queue.clock() - keep):
        count += len(gone)
        for study in set(gone.values()):
            if not queue.jobs(study=study, most=1):
                shutil.rmtree(log_folder(searches.storage, study), ignore_errors=True)
        searches.drop_result_lines(gone)
    if count:
        log.info("old searches forgotten", extra={"fields": {"searches": count}})
        searches.changes.notify_all()
    return count
