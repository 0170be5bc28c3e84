"""Checkpoints of a run with several learners. It resumes from one that all learners saved at the same exchange."""

from __future__ import annotations

from pathlib import Path

from freewheel.errors import CheckpointError, FileError, SetupError
from freewheel.files.read import json_object
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import PROGRESS, Name
from freewheel.run.checkpoints.run_progress import Earlier
from freewheel.run.naming import CHECKPOINTS
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.rank import RankInfo

FOLDER = "learners"  # in a run directory: the folders of all learners but the first
CHOSEN = "agreed"  # the note with the exchange that the run resumes from


def agreed_of(folder: Path) -> dict[int, Name]:
    """Return the full checkpoints of a learner by the exchange at which they were saved."""
    root = folder / CHECKPOINTS
    found: dict[int, Name] = {}
    for name in reversed(checkpoint.names(root)):
        if checkpoint.is_full(root / str(name)):
            try:
                found[int(json_object(root / str(name) / PROGRESS)["learners"]["agreed"])] = name
            except (FileError, KeyError, TypeError, ValueError):  # a damaged checkpoint: try the others
                continue
    return found


def check_number(run: Path, learners: int, place: RankInfo | None) -> None:
    """Raise SetupError if torchrun has started a different number of learners than the run has."""
    started = 1 if place is None else place.count
    if place is not None and started != learners:
        ways = f"torchrun --nproc-per-node {learners} -m freewheel resume {run}" if learners > 1 else "no torchrun"
        raise SetupError(f"{run} has {learners} learners and cannot resume with {started}: use {ways}")


def newest_of_all(run: Path, learners: int, which: str = "") -> str:
    """Return the first learner's newest checkpoint that all learners have. which: the requested one, if any."""
    own = agreed_of(run)
    if which not in ("", "latest"):
        asked = checkpoint.named(which, list(reversed(own.values())))
        own = {agreed: name for agreed, name in own.items() if name == asked}
    folders = [run / FOLDER / str(rank) for rank in range(1, learners)]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise CheckpointError(f"{missing[0]} is missing: resuming needs the checkpoints of learner {missing[0].name}")
    common = set(own).intersection(*(agreed_of(folder) for folder in folders))
    if not common:
        remedy = f"freewheel train --init {run} starts a new run from its weights"
        raise CheckpointError(f"{run} has no checkpoint that all its {learners} learners have saved: {remedy}")
    return str(own[max(common)])


def never_saved(run: Path, learners: int) -> bool:
    """Return whether a run ended before all its learners had saved their first checkpoint."""
    own = checkpoint.names(run / CHECKPOINTS)
    others = [run / FOLDER / str(rank) for rank in range(1, learners)]
    first_save = len(own) == 1 and any(one.is_dir() and not checkpoint.names(one / CHECKPOINTS) for one in others)
    return not own or first_save


def remedy(run: Path, learners: int) -> str:
    """Return the advice for a user whose run has lost a learner."""
    if never_saved(run, learners):
        return f"there is no checkpoint yet that all learners can resume from; freewheel resume {run} starts it again"
    try:
        step = newest_of_all(run, learners)
    except FileError:
        return f"there is no checkpoint yet that all learners have; freewheel train --init {run} takes its weights"
    return f"freewheel resume {run} continues from step {step}"


def chosen_state(folder: Path, group: Group) -> Earlier:
    """Return the checkpoint of a learner after the first, at the exchange that the first learner has chosen."""
    agreed = group.noted(CHOSEN, JOIN)
    name = agreed_of(folder).get(agreed)
    if name is None:
        raise CheckpointError(f"{folder} has no checkpoint of exchange {agreed}, which the run resumes from")
    return Earlier(folder, *checkpoint.load_state(folder / CHECKPOINTS, str(name)))
