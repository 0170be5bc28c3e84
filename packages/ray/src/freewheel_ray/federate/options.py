"""The campaign `freewheel train --federate` and its options; light, because every `freewheel train --help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from freewheel.cli.campaigns import Campaign, CampaignRequest
from freewheel.errors import Range, UsageError, check_ranges

MOST_SITES = 1000
FEDERATION, SITES = "federation.json", "sites"  # in the run directory of a coordinator


@dataclass(frozen=True)
class FederateOptions:
    """Sites that share no data."""

    federate: Annotated[int | None, Range(least=1, most=1_000_000)] = None
    """Train at several sites, processes on a Ray cluster (a local one, or --address), and average what they have learned so many
    times: only weights travel. --steps are those of each site. See packages/ray/docs/federate.md."""
    sites: str = "auto"
    """With --federate: how many sites, all with ENV and a seed each (auto: one for each node, at least 2); or a TOML file with a
    table for each site: its env, options and node."""
    round_timeout: Annotated[float | Literal["auto"], Range(above=0, most=1e7)] = "auto"
    """Seconds that a round may take; sites that have not answered by then are skipped, and join again later. auto: three times as
    long as half of the sites took, at least 30."""
    min_sites: Annotated[int, Range(least=1, most=MOST_SITES)] = 1
    """Sites that an average needs; a round in which fewer answer changes nothing."""
    site_restarts: Annotated[int, Range(least=0, most=1_000_000)] = 3
    """How often the training of a site is started again after it was lost."""
    site_report: Literal["nothing", "returns"] = "nothing"
    """What sites tell beside weights and row counts: returns, the mean return of their episodes in a round."""

    def __post_init__(self) -> None:
        check_ranges(self)
        given = next((one.name for one in fields(FederateOptions)[1:] if getattr(self, one.name) != one.default), None)
        if self.federate is None and given is not None:
            option = f"--{given.replace('_', '-')}"
            raise UsageError(f"{option} is an option of --federate ROUNDS; add that or leave it out")

    @property
    def time_limit(self) -> float | None:
        """Of a round, in seconds; None: by the time that half of the sites take."""
        return None if self.round_timeout == "auto" else self.round_timeout


def _train(own: FederateOptions, request: CampaignRequest) -> int:
    from freewheel.files.output import lasting_output
    from freewheel.run.plan import print_line
    from freewheel_ray.federate.federation import read, train

    if request.print_config:
        raise UsageError("--federate is one run of many sites: leave out --print-config")
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
    """Whether this is the run directory of a coordinator."""
    return (path / FEDERATION).is_file() or (path / SITES).is_dir()


CAMPAIGN = Campaign(name="federate", options=FederateOptions, train=_train, owns=_owns, resume=_resume)
