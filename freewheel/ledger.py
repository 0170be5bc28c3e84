"""The ledger checks that every row is accounted for: produced = trained + queued + open + dropped, or the run stops."""

from __future__ import annotations

from dataclasses import replace

from freewheel.core import CAUSES, RowCounts
from freewheel.errors import LedgerError, nearest


class Drops:
    """Dropped rows, counted by cause."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def add(self, cause: str, rows: int) -> None:
        if cause not in CAUSES:
            raise LedgerError(f"rows were dropped for an unknown cause '{cause}'{nearest(cause, CAUSES)}")
        if rows < 0:
            raise LedgerError(f"dropped[{cause}] cannot shrink, but {rows} rows were added to it")
        if rows:
            self._rows[cause] = self._rows.get(cause, 0) + int(rows)

    @property
    def by_cause(self) -> dict[str, int]:
        """Causes with at least one row, in the order of core.CAUSES."""
        return {cause: self._rows[cause] for cause in CAUSES if cause in self._rows}


def total(*accounts: RowCounts) -> RowCounts:
    """Return the sum of the accounts, whether or not they balance."""
    drops = Drops()
    for account in accounts:
        for cause, rows in account.dropped.items():
            drops.add(cause, rows)
    counts = [(account.produced, account.trained, account.queued, account.open) for account in accounts]
    produced, trained, queued, still_open = (sum(int(terms[term]) for terms in counts) for term in range(4))
    return RowCounts(produced, trained, queued, still_open, drops.by_cause)


def balance(*accounts: RowCounts) -> RowCounts:
    """Return the sum of the accounts; LedgerError unless every produced row is in exactly one place."""
    rows = total(*accounts)
    found = rows.trained + rows.queued + rows.open + sum(rows.dropped.values())
    negative = any(min(one.produced, one.trained, one.queued, one.open) < 0 for one in accounts)
    if negative or rows.produced != found:
        raise LedgerError(_report(rows, found, accounts))
    return rows


def settle(*accounts: RowCounts) -> RowCounts:
    """Return the sum of the accounts at the end of a run: rows that are still open or queued are dropped."""
    rows = balance(*accounts)
    unused = rows.queued + rows.open
    shutdown = rows.dropped.get("shutdown", 0) + unused  # includes drops of earlier sessions
    dropped = {**rows.dropped, "shutdown": shutdown} if unused else rows.dropped
    return replace(rows, queued=0, open=0, dropped=dropped)


def _report(total: RowCounts, found: int, accounts: tuple[RowCounts, ...]) -> str:
    surplus = found - total.produced
    verdict = f"{abs(surplus)} rows were {'doubled' if surplus > 0 else 'lost'}" if surplus else "a count is negative"
    parties = "\n".join(f"  account {number}: {_terms(account)}" for number, account in enumerate(accounts, start=1))
    return (
        f"the ledger does not balance: {verdict}; please report this, results cannot be trusted\n"
        f"  {_terms(total)} = {found} found\n{parties}"
    )


def _terms(rows: RowCounts) -> str:
    dropped = " + ".join(f"dropped[{cause}] {count}" for cause, count in rows.dropped.items()) or "dropped 0"
    return f"produced {rows.produced} : trained {rows.trained} + queued {rows.queued} + open {rows.open} + {dropped}"
