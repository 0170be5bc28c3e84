"""The sites of a federation, each with its name, its command line and its place in the cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freewheel.config import flags, resolve
from freewheel.config.translation import FREE
from freewheel.config.trust import Consent
from freewheel.envs.family import family_of
from freewheel.errors import FileError, UsageError
from freewheel.files.read import value_of
from freewheel.seeding import tree
from freewheel_ray.federate.options import MOST_SITES

TRACKERS = ("sinks", "tensorboard", "wandb")
#: Options that a site cannot have, and the reasons.
REFUSED = {
    **dict.fromkeys(("minutes", "episodes"), "rounds are counted in steps; use --steps, the steps of each site"),
    "record_schedule": "a schedule does not hold what comes from other sites; leave it out",
    **dict.fromkeys(TRACKERS, "metrics of a site would leave it; read its metrics.jsonl there"),
    "learners": "a site has one learner; leave it out",
}
PLACE = {"node": str, "cpus": float, "gpus": float, "resources": dict[str, float]}
OWN = ("run", "runs_dir", "config", "preset")  # options that the table of a site cannot have


@dataclass(frozen=True)
class SiteConfig:
    """The configuration of one site."""

    name: str
    words: tuple[str, ...]  # its command line, without the options that the coordinator adds
    steps: int  # steps of its training
    place: Mapping[str, Any] = field(default_factory=dict)  # node, cpus, gpus, resources


def check_options(given: Mapping[str, Any], config: resolve.Config, where: str = "--federate") -> None:
    """Raise UsageError about options that a site cannot have."""
    for name, why in REFUSED.items():
        value = given.get(name)
        if value is not None and value not in (("False",), ("1",) if name == "learners" else ()):
            raise UsageError(f"{where} cannot be used with {flags.as_flag(name)}: {why}")
    if config.mode == "ray":
        raise UsageError(
            f"{where} cannot be used with --mode ray: a site collects on its own machine; choose another --mode"
        )


def read(text: str, nodes: int) -> Sequence[Mapping[str, Any]]:
    """Return the tables of the sites with their names, from a file or as a number of sites without options."""
    if text == "auto" or text.isdecimal():
        count = max(2, nodes) if text == "auto" else int(text)
        if not 1 <= count <= MOST_SITES:
            raise UsageError(f"--sites must be between 1 and {MOST_SITES}, not {count}")
        return [{"name": f"site-{number}"} for number in range(1, count + 1)]
    if Path(text).suffix != ".toml":
        raise UsageError(f"--sites takes a number, auto or a TOML file, not {flags.shortened(text)}")
    try:
        tables = flags.read_file(Path(text), typed=True)
    except UsageError as error:
        raise UsageError(str(error).replace("--config", "--sites", 1)) from None
    if not 1 <= len(tables) <= MOST_SITES:
        raise UsageError(f"{text} has {len(tables)} tables; give one for each site, 1 to {MOST_SITES}")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UsageError(f"{text} has {name} outside of a table; write [site-name] above the options of a site")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name):
            raise UsageError(f"{text} has a site '{name[:70]}'; names may have letters, digits, '.', '-' and '_'")
    return [{"name": name, **table} for name, table in tables.items()]


def site_of(
    table: Mapping[str, Any], number: int, argv: Sequence[str], *, trust: bool, source: str = "--sites"
) -> SiteConfig:
    """Return the configuration of a site: the federation's command line, overridden by the options of the site's table. Code that
    the file `source` names is used only with `trust`."""
    name, rest = str(table["name"]), {key: value for key, value in table.items() if key not in ("name", *PLACE)}
    positional, common = resolve.read_options(argv)
    if taken := next((key for key in OWN if key in rest), None):
        raise UsageError(f"site {name}: leave out '{taken}'; the federation chooses it for all sites")
    try:
        place = {
            key: value_of(kind, table[key], f"{key} of site {name}") for key, kind in PLACE.items() if key in table
        }
    except FileError as error:
        raise UsageError(str(error)) from None
    given = dict(common.flags)
    given.setdefault("env", tuple(positional[:1]))
    seed = int(given["seed"][0]) if given.get("seed", ("",))[0].isdecimal() else 0
    given |= {"seed": (str(tree(seed, "site", number)),), "evals": ("0",)}
    own = flags.Layer(f"file {source}", _flags(rest), trusted=trust)
    given |= own.flags
    words = _words(given)
    try:
        Consent(trust).check([common, own], family_of(given["env"][0] if given["env"] else ""))
        config = resolve.from_argv(words, trust=trust)
        check_options(given, config, f"site {name}" if rest else "--federate")
    except UsageError as error:
        raise UsageError(
            f"site {name}: {error}" if rest and not str(error).startswith("site") else str(error)
        ) from None
    assert config.run.budget.steps is not None, "other budgets are refused"
    return SiteConfig(name, tuple(words), config.run.budget.steps, place)


def _flags(table: Mapping[str, Any]) -> flags.Flags:
    """Return a table of options as command-line words. Tables may be nested or dotted; env_args are arguments of the env."""
    args = table.get("env_args", {})
    plain = {key: value for key, value in table.items() if key != "env_args"}
    flat = flags.flatten(plain | {f"{FREE}{key}": value for key, value in args.items()}, FREE)
    return {
        name: (json.dumps(value),) if name.startswith(FREE) or name == "context" else flags.tokens(value)
        for name, value in flat.items()
    }


def _words(given: flags.Flags) -> list[str]:
    """Return the command line that gives these options."""
    found: list[str] = []
    for name, values in given.items():
        found += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return found
