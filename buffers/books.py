"""A run's ledger, added up again from every row of its journal.

Nothing here trusts a count that the run kept: each uid and each rollout is counted from its own row. Only duplicates,
rejections and failures have no rows and are the journal's own counts. Blocking: the file system only.
"""

from __future__ import annotations

import pathlib

import msgspec

from buffers.journal import Journal
from buffers.shelf import Shelf
from streamrl.records import BufferStats


def has_journal(path: pathlib.Path) -> bool:
    """Whether a buffer has left a journal in this folder."""
    return (path / "data.mdb").exists()


def read_books(path: pathlib.Path, *, group_size: int) -> BufferStats:
    """The ledger that the journal in this folder adds up to.

    Raises:
        ValueError: another process has it open, or it is of another group size or format.
    """
    journal = Journal(path, sync=False, group_size=group_size)
    try:
        stats = Shelf(group_size=group_size, journal=journal, now=0.0).ledger.counts()
        state = journal.state()
        if state is None:
            return stats
        return msgspec.structs.replace(
            stats,
            duplicate_rollouts=state.duplicates,
            rejected_rollouts=state.rejected,
            failed_members=state.failed,
            policy_version=state.policy_version,
        )
    finally:
        journal.close()
