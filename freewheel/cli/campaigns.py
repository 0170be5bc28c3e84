"""Campaigns: several trainings under one `freewheel train` command, from other packages (`freewheel.campaigns`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.errors import UsageError
from freewheel.registry import Registry

if TYPE_CHECKING:
    from freewheel.config.flags import Flags


@dataclass(frozen=True)
class CampaignRequest:
    """The rest of the command line, for a campaign."""

    argv: Sequence[str]  # the words that belong to the trainings
    dry_run: bool
    print_config: bool
    trust: bool


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Several trainings that an option of `freewheel train` starts."""

    name: str  # the option that starts the campaign if its value is not the default
    options: type[Any]  # a frozen dataclass with defaults: its fields are options of `freewheel train`
    train: Callable[[Any, CampaignRequest], int]  # takes these options, returns the exit code
    owns: Callable[[Path], bool] = lambda _: False  # whether a run directory belongs to this campaign
    resume: Callable[[Path, bool], int] | None = None  # takes such a directory and --trust, returns the exit code

    def wanted(self, options: Any) -> bool:
        default = getattr(self.options(), self.name)
        return bool(getattr(options, self.name) != default)


CAMPAIGNS: Registry[Campaign] = Registry("campaign", "CAMPAIGN")


def chosen(given: Mapping[str, Flags]) -> tuple[Campaign, Any] | None:
    """Return the requested campaign and its options, if any; `given` maps the name of every campaign to its flags."""
    from freewheel.config.flags import build

    built = [(one, build(one.options, given[one.name])) for one in CAMPAIGNS.values()]
    found = [(one, options) for one, options in built if one.wanted(options)]
    if len(found) > 1:
        raise UsageError(f"give {' or '.join(f'--{one.name}' for one, _ in found)}, not both")
    return found[0] if found else None


def separated(given: Flags) -> tuple[Flags, dict[str, Flags]]:
    """Split the flags into the command's flags and, by name, each campaign's flags."""
    from freewheel.config.flags import option_types

    own: Flags = dict(given)
    theirs: dict[str, Flags] = {}
    for name, campaign in CAMPAIGNS.items():
        theirs[name] = {flag: own.pop(flag) for flag in option_types(campaign.options) if flag in own}
    return own, theirs


def owner(path: Path) -> Campaign | None:
    """Return the campaign that a run directory belongs to."""
    return next((one for one in CAMPAIGNS.values() if one.owns(path)), None)
