"""Checkpoints that all learners of a run have: a run goes on from one that every learner has saved at the same exchange."""

from __future__ import annotations

from pathlib import Path

from freewheel.errors import CheckpointError, FileError, SetupError
from freewheel.files.read import json_object
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import PROGRESS, Name
from freewheel.run.checkpoints.progress import Earlier
from freewheel.run.naming import CHECKPOINTS
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.place import RankInfo

FOLDER = "learners"  # of a run directory: what learners but the first keep
CHOSEN = "agreed"  # the note with the exchange that the run goes on from


def agreed_of(folder: Path) -> dict[int, Name]:
    """The full checkpoints of a learner, by the exchange at which they were saved."""
    root = folder / CHECKPOINTS
    found: dict[int, Name] = {}
    for name in reversed(checkpoint.names(root)):
        if checkpoint.is_full(root / str(name)):
            try:
                found[int(json_object(root / str(name) / PROGRESS)["learners"]["agreed"])] = name
            except (FileError, KeyError, TypeError, ValueError):  # damaged: the others are tried
                continue
    return found


def check_number(run: Path, learners: int, place: RankInfo | None) -> None:
    """SetupError if torchrun has started another number of learners than a run has."""
    started = 1 if place is None else place.count
    if place is not None and started != learners:
        ways = f"torchrun --nproc-per-node {learners} -m freewheel resume {run}" if learners > 1 else "no torchrun"
        raise SetupError(f"{run} has {learners} learners and cannot go on with {started}: use {ways}")


def newest_of_all(run: Path, learners: int, which: str = "") -> str:
    """The newest checkpoint of the first learner that all others have as well; `which`: the one that is asked for."""
    own = agreed_of(run)
    if which not in ("", "latest"):
        asked = checkpoint.named(which, list(reversed(own.values())))
        own = {agreed: name for agreed, name in own.items() if name == asked}
    folders = [run / FOLDER / str(rank) for rank in range(1, learners)]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise CheckpointError(f"{missing[0]} is missing: what learner {missing[0].name} has saved is needed to go on")
    common = set(own).intersection(*(agreed_of(folder) for folder in folders))
    if not common:
        remedy = f"freewheel train --init {run} starts a new run from its weights"
        raise CheckpointError(f"{run} has no checkpoint that all its {learners} learners have saved: {remedy}")
    return str(own[max(common)])


def never_saved(run: Path, learners: int) -> bool:
    """Whether a run was ended before all its learners had saved anything to go on from."""
    own = checkpoint.names(run / CHECKPOINTS)
    others = [run / FOLDER / str(rank) for rank in range(1, learners)]
    first_save = len(own) == 1 and any(one.is_dir() and not checkpoint.names(one / CHECKPOINTS) for one in others)
    return not own or first_save


def remedy(run: Path, learners: int) -> str:
    """What to do when a learner is gone."""
    if never_saved(run, learners):
        return f"no checkpoint was saved yet from which all could go on; freewheel resume {run} starts it again"
    try:
        step = newest_of_all(run, learners)
    except FileError:
        return f"no checkpoint was saved yet from which all could go on; freewheel train --init {run} takes its weights"
    return f"freewheel resume {run} goes on from step {step}"


def chosen_state(folder: Path, group: Group) -> Earlier:
    """Where a learner but the first goes on: at the exchange that the first one has chosen."""
    agreed = group.noted(CHOSEN, JOIN)
    name = agreed_of(folder).get(agreed)
    if name is None:
        raise CheckpointError(f"{folder} has no checkpoint of the exchange {agreed}, from which the run goes on")
    return Earlier(folder, *checkpoint.load_state(folder / CHECKPOINTS, str(name)))
