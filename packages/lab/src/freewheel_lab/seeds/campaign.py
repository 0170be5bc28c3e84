"""This module defines the option `--seeds` of `freewheel train`. It imports little, because every
`freewheel train --help` loads it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from freewheel.cli.campaigns import Campaign, CampaignRequest
from freewheel.errors import Range, UsageError, check_ranges


@dataclass(frozen=True)
class SeedsOptions:
    """Run one command several times."""

    seeds: str = ""
    """Run the same command with each of these seeds (1..5 or 1,2,7). As many runs as the cores
    allow run at the same time. The mean and the confidence interval of their evaluations are
    reported. The runs are NAME-s1, NAME-s2, ...; NAME-seeds.json has the table."""
    jobs: Annotated[int | None, Range(least=1, most=10_000)] = None
    """Number of runs of --seeds at the same time (default: as many as the cores can serve)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.jobs is not None and not self.seeds:
            raise UsageError("--jobs is the number of runs of --seeds side by side; add --seeds or leave it out")


def _train(own: SeedsOptions, request: CampaignRequest) -> int:
    from freewheel.config import resolve
    from freewheel.files.stdout import lasting_output
    from freewheel.run.planning import print_line
    from freewheel.run.trainer import check
    from freewheel_lab.seeds import group as seeds

    numbers = seeds.read(own.seeds)
    argv = list(request.argv)
    trust = request.trust or request.print_config
    if resolve.from_argv(argv, trust=trust).sources.get("seed") == "flag":
        raise UsageError("give --seed or --seeds, not both")
    config = resolve.from_argv([*argv, "--seed", str(numbers[0])], trust=trust)
    if request.print_config:
        sys.stdout.write(config.to_text())
        return 0
    planned = check(config)
    if request.dry_run:
        group = seeds.group_of(planned, numbers, own.jobs)
        print_line("\n".join(seeds.plan_lines(planned, group)))
        return 0
    if config.among:  # so that all runs use the same mode
        argv = [*argv, "--mode", planned.config.mode]
    with lasting_output():
        trusting = [*argv, "--trust"] if request.trust else argv
        return seeds.claim(planned, numbers, own.jobs).start(trusting, config.run.output.log_every)


CAMPAIGN = Campaign(name="seeds", options=SeedsOptions, train=_train)
