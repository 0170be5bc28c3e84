"""Resume an interrupted federation from its newest average and play the remaining rounds. Each site resumes from its own
checkpoint, or starts again from the average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from freewheel.config.resolve import Config, from_argv, from_file
from freewheel.core import Snapshot
from freewheel.errors import CheckpointError
from freewheel.files import disk, signatures
from freewheel.files.read import content, json_object, parse_arrays, record, show
from freewheel.run.advice.auto_mode import plan_run
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import CHECKPOINTS, CONFIG, SUMMARY
from freewheel.run.planning import print_line
from freewheel.run.process import import_torch
from freewheel.run.saved import check_fit
from freewheel_ray.federate.average import weights_of
from freewheel_ray.federate.coordinator import FederationStart
from freewheel_ray.federate.federation import Federation, train
from freewheel_ray.federate.options import FEDERATION, FederateOptions
from freewheel_ray.federate.rounds import SiteTotals
from freewheel_ray.federate.run_dir import AVERAGE
from freewheel_ray.federate.site_config import SiteConfig

T = TypeVar("T")

MOST = 1 << 40  # largest number of bytes in an average


@dataclass(frozen=True)
class SavedFederation:
    """The contents of federation.json."""

    rounds: int
    round: int
    env_steps: int
    wall_s: float
    address: str | None
    trust: bool
    options: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    evaluation: dict[str, Any] | None = None
    best_version: int | None = None


def resume(path: Path, *, trust: bool = False) -> int:
    """Play the remaining rounds and return the exit code."""
    file = path / FEDERATION
    if not file.exists():
        raise CheckpointError(f"{path} ended before its first round and cannot be resumed; start a new federation")
    data = json_object(file)
    signed = data.pop(signatures.FIELD, None)
    saved = record(SavedFederation, data, str(file))
    if not trust and not signatures.made_here("federation", data, signed):
        raise signatures.refusal(str(file), f"the options of sites {show(next(iter(saved.sites), ''))}")
    if saved.round >= saved.rounds:
        done = f"{saved.rounds} of {saved.rounds} rounds are done"
        print_line(f"{path.name} is complete: {done}; use train --init {path} to start from its average")
        return 0
    learned = parse_arrays(content(path / AVERAGE, MOST), str(path / AVERAGE))
    trusted = trust or saved.trust
    config = from_file(path / CONFIG, trust=trusted)
    planned = plan_run(config, print_line, meanwhile=import_torch, run=path)
    check_fit(checkpoint.load(path / CHECKPOINTS), planned.spec)
    if weights_of(learned, planned.policy).keys() != checkpoint.load(path / CHECKPOINTS).params.keys():
        raise CheckpointError(f"{path / AVERAGE} does not match the checkpoints; restore it from a copy")
    options = record(FederateOptions, saved.options, f"options of {file}")
    sites = [_settled(_part(SiteConfig, one, name, file), planned.config, trusted) for name, one in saved.sites.items()]
    tallies = {name: _part(SiteTotals, one, name, file) for name, one in saved.sites.items()}
    federation = Federation(planned, sites, options, saved.address, trusted)
    best = _best(saved, path)
    start = FederationStart(saved.round, saved.env_steps, learned, saved.wall_s, tallies, saved.evaluation, best)
    disk.remove(path / SUMMARY)
    print_line(f"continuing after round {saved.round} of {saved.rounds}")
    return train(federation, start)


def _settled(site: SiteConfig, config: Config, trust: bool) -> SiteConfig:
    """Fix the options that the site leaves to defaults, because the defaults may have changed since the federation began."""
    own = from_argv(site.words, trust=trust)
    found = {"policy.normalize_obs": config.policy.normalize_obs}
    if own.algo == config.algo and (first := getattr(config.learner, "first_temperature", None)) is not None:
        found[f"{config.algo}.first_temperature"] = first
    words = [f"--{name}={value}" for name, value in found.items() if own.sources.get(name) != "flag"]
    return replace(site, words=(*site.words, *words))


def _part(kind: type[T], data: Mapping[str, Any], name: str, file: Path) -> T:
    """Read the fields of this type from the record of a site."""
    names = [one.name for one in fields(cast(Any, kind))]
    return record(kind, {key: data[key] for key in names if key in data}, f"site {show(name)} of {file}")


def _best(saved: SavedFederation, path: Path) -> Snapshot | None:
    root = path / CHECKPOINTS
    if saved.best_version is None or checkpoint.target(root, "best") is None:
        return None
    return Snapshot(saved.best_version, checkpoint.load(root, "best").params)
