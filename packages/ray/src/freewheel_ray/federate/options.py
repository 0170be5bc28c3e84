"""The options of `freewheel train --federate`. Every `freewheel train --help` imports this module, so it must stay light."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from freewheel.cli.campaigns import Campaign, CampaignRequest
from freewheel.errors import Range, UsageError, check_ranges

MOST_SITES = 1000
FEDERATION, SITES = "federation.json", "sites"  # a file and a folder in the coordinator's run directory


@dataclass(frozen=True)
class FederateOptions:
    """Train at several sites that share no data."""

    federate: Annotated[int | None, Range(least=1, most=1_000_000)] = None
    """Train at several sites and average their weights this many times. Sites are processes on a Ray cluster (a local one, or
    --address) and send only weights. --steps counts the steps of each site. See packages/ray/docs/federate.md."""
    sites: str = "auto"
    """With --federate: the number of sites, which train ENV with different seeds (auto: one for each node, at least 2), or a TOML
    file with a table for each site that names its env, options and node."""
    round_timeout: Annotated[float | Literal["auto"], Range(above=0, most=1e7)] = "auto"
    """Time limit of a round in seconds. Sites that have not answered by then are skipped and join again later. auto: three times
    the time that half of the sites took, at least 30."""
    min_sites: Annotated[int, Range(least=1, most=MOST_SITES)] = 1
    """Number of sites that an average needs. A round with fewer answers changes nothing."""
    site_restarts: Annotated[int, Range(least=0, most=1_000_000)] = 3
    """How often a lost site is started again."""
    site_report: Literal["nothing", "returns"] = "nothing"
    """What sites report in addition to weights and row counts. returns: the mean return of their episodes in a round."""

    def __post_init__(self) -> None:
        check_ranges(self)
        given = next((one.name for one in fields(FederateOptions)[1:] if getattr(self, one.name) != one.default), None)
        if self.federate is None and given is not None:
            option = f"--{given.replace('_', '-')}"
            raise UsageError(f"{option} is an option of --federate ROUNDS; add --federate or leave {option} out")

    @property
    def time_limit(self) -> float | None:
        """The time limit of a round in seconds; None: it follows from the time that half of the sites take."""
        return None if self.round_timeout == "auto" else self.round_timeout


def _train(own: FederateOptions, request: CampaignRequest) -> int:
    from freewheel.files.stdout import lasting_output
    from freewheel.run.planning import print_line
    from freewheel_ray.federate.federation import read, train

    if request.print_config:
        raise UsageError("--federate trains sites with different configurations; leave out --print-config")
    federation = read(request.argv, own, trust=request.trust)
    if request.dry_run:
        print_line("\n".join(federation.lines()))
        return 0
    with lasting_output():
        return train(federation)


def _resume(path: Path, trust: bool) -> int:
    from freewheel_ray.federate import resume

    return resume.resume(path, trust=trust)


def _owns(path: Path) -> bool:
    """Return whether this is the run directory of a coordinator."""
    return (path / FEDERATION).is_file() or (path / SITES).is_dir()


CAMPAIGN = Campaign(name="federate", options=FederateOptions, train=_train, owns=_owns, resume=_resume)
