"""What can be set about a search, and what a trial makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from freewheel.config import flags
from freewheel.config.resolve import FREE
from freewheel.errors import UsageError, nearest
from freewheel.worlds.cage2.workflow.envs import FAST, REAL, WEIGHT
from freewheel.worlds.cage2.workflow.progress import Stops
from freewheel.worlds.cage2.workflow.search import Rules, Strategy

#: The worlds that can be searched, by the names that `train` knows them by, and as they are under a workflow.
WORLDS = {"freewheel/Cage2-v0": FAST, "cyborg:Scenario2": REAL}
PRESET = "cage2"  # settings that learn well here
REAL_EVAL = 10  # greedy episodes after a trial on the real simulator, where a hundred take half a minute
EPISODES = 100  # an update, in a mode that counts them and where nobody says


@dataclass(frozen=True)
class SearchOptions:
    """The search."""

    env: str = "freewheel/Cage2-v0"
    """The world: freewheel/Cage2-v0, or cyborg:Scenario2 for the real simulator. Also the first word."""
    red_agent: Literal["B_lineAgent", "RedMeanderAgent", "SleepAgent", "mixture"] = "B_lineAgent"
    """Who attacks; mixture: the first or the second, drawn for every episode."""
    max_episode_steps: int = 100
    """Steps of an episode."""
    strategy: Strategy = "gp"
    """gp: a Gaussian process and its upper confidence bound; greedy: the same without exploration; random: any order;
    canonical: six orders that people would try, with equal shares; plain: no workflow, all episodes in one run."""
    total_episodes: int = 100_000
    """Episodes of the whole search."""
    max_episodes_per_workflow: int = 10_000
    """Episodes that one workflow may have (gp, greedy, random)."""
    episodes_per_update: int | None = None
    """Learn from this many episodes at a time, or as many rows where a mode does not collect whole ones (default: the mode's)."""
    alignment_lambda: float = WEIGHT
    """Weight of compliance in the reward: following the order throughout an episode earns this much."""
    compliance_threshold: float = 0.9
    """Mean compliance at which a workflow has been learned; an order that ends below has failed and is not tried again."""
    gp_beta: float = 2.0
    """How far exploration looks up: the bound is mean + beta × deviation."""
    warm_start: bool = True
    """Begin with the weights of the nearest order that was trained; --no-warm-start: begin anew every time."""
    fixed_episodes: bool = False
    """Give every workflow all its episodes: neither threshold nor plateau ends its training."""
    window: int = 100
    """Episodes that a mean is taken over; with fewer left than this, the search is over."""
    plateau: int = 5
    """Windows without a better return after which a workflow's training ends; 0: go on."""
    mode: Literal["auto", "sequential", "lockstep", "batch", "continuous", "episodes"] = "auto"
    """How experience is collected; auto: batched on our world, episodes on the real simulator."""
    n_workers: int | None = None
    """Worker processes, in modes that have some (default: as many as the cores and the step time suggest)."""
    seed: int = 0
    """The one seed that everything random grows from."""
    run: str = ""
    """Name of the search: its directory under --runs-dir (default: workflow-STRATEGY, numbered)."""
    runs_dir: str = "runs"
    """Where it is kept."""
    resume: bool = False
    """Take up the search --run where it was ended; only --total-episodes may be another one."""
    dry_run: bool = False
    """Show the plan and start nothing."""

    def __post_init__(self) -> None:
        if self.env not in WORLDS:
            raise UsageError(f"no workflows in '{self.env}'{nearest(self.env, WORLDS)}")
        for name in ("max_episode_steps", "window", "n_workers", "episodes_per_update"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
        if self.plateau < 0 or not self.alignment_lambda >= 0:
            raise UsageError("--plateau and --alignment-lambda must not be negative")
        if "/" in self.run or self.run.startswith("."):
            raise UsageError(f"--run '{self.run}' must be a plain name; --runs-dir says where it is kept")
        if self.resume and not self.run:
            raise UsageError("--resume which search? name it by --run")
        self.rules  # noqa: B018 - complains about what is left

    @property
    def rules(self) -> Rules:
        return Rules(
            strategy=self.strategy,
            total_episodes=self.total_episodes,
            max_episodes=self.max_episodes_per_workflow,
            least_episodes=min(self.window, self.max_episodes_per_workflow, self.total_episodes),
            threshold=self.compliance_threshold,
            beta=self.gp_beta,
            warm_start=self.warm_start,
            fixed_episodes=self.fixed_episodes,
            seed=self.seed,
        )

    @property
    def stops(self) -> Stops:
        return Stops(self.compliance_threshold, self.window, self.plateau)

    def training(self, passed: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `freewheel.train` that every trial shares; those passed on win."""
        world: dict[str, Any] = {"red_agent": self.red_agent, "alignment_lambda": self.alignment_lambda}
        options: dict[str, Any] = {"preset": PRESET, "evals": 1}
        length = {"max_episode_steps": self.max_episode_steps}
        real = WORLDS[self.env] == REAL
        (world if real else options).update(length)
        if real:
            options["eval_episodes"] = REAL_EVAL
        mode = "episodes" if real and self.mode == "auto" else self.mode
        if mode != "auto":
            options["mode"] = mode
        if mode == "episodes":
            batch = self.episodes_per_update or EPISODES
            options |= {"workers": "auto", "num_envs": "auto", "episodes_per_update": batch}
        if self.n_workers is not None:
            options["workers"] = self.n_workers
        return {**options, "env_args": world, **passed, "env": WORLDS[self.env], "seed": self.seed}


def read(argv: Sequence[str]) -> tuple[SearchOptions, dict[str, Any], list[str]]:
    """The search that a command line asks for, the options that it passes on to `train`, and the names of all it gives."""
    own, passed = _split(argv)
    positional, given = flags.read_argv(own, flags.option_types(SearchOptions))
    if len(positional) + ("env" in given) > 1:
        raise UsageError(f"one world at a time, not {' '.join([*positional, *given.get('env', ())])}")
    if positional:
        given["env"] = (positional[0],)
    return flags.build(SearchOptions, given), passed, [*given, *passed]


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Our own words, and the options of theirs with their values."""
    known = flags.option_types(SearchOptions)
    own: list[str] = []
    theirs: dict[str, list[str]] = {}
    taking = own  # the words that come
    for word in argv:
        if not word.startswith("--"):
            taking.append(word)
            continue
        spelt, equals, value = word[2:].partition("=")
        name = flags.canonical(spelt, FREE)
        if name in known or known.get(name.removeprefix("no_")) is bool:
            own.append(word)
            taking = own
        else:
            taking = theirs[name] = [value] if equals else []
    return own, {name: _value(name, words) for name, words in theirs.items()}


def _value(name: str, words: list[str]) -> Any:
    """As `train` takes it; what belongs to the world's constructor is JSON where it can be."""
    if not words:
        return True
    value = words[0] if len(words) == 1 else words
    try:
        return json.loads(words[0]) if name.startswith(FREE) else value
    except json.JSONDecodeError:
        return value
