"""The command `freewheel workflow search`: its options, its state on disk, and its output."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from freewheel.config import flags, resolve, synonyms
from freewheel.config.translation import FREE, literal
from freewheel.errors import COUNT, SEED, SHARE, Range, SetupError, UsageError, check_ranges, nearest
from freewheel.files.reach import check_folder, typed
from freewheel.files.terminal import Terminal
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.run.planning import plan
from freewheel_cage2 import family
from freewheel_cage2.scenario import RED_AGENTS, find_red
from freewheel_cage2.workflow import search
from freewheel_cage2.workflow.envs import FAST, REAL, WEIGHT
from freewheel_cage2.workflow.search import Proposal, SearchRules, Strategy, TrialOutcome, WorkflowSearch
from freewheel_cage2.workflow.trial_progress import TrialProgress, which_trial
from freewheel_cage2.workflow.trials import (
    SIGNALLED,
    TRIALS,
    InterruptedSearch,
    SearchFiles,
    StopRules,
    TrialRunner,
    workflow,
)

#: The environments that can be searched: the names in `train`, and the versions with a workflow.
WORLDS = {family.FAST: FAST, family.REAL: REAL}
PRESET = "cage2"
REAL_EVAL = 10  # evaluation episodes after a trial on the real simulator; 100 would take half a minute
MODE_WORDS = {**synonyms.MODES, "async": "episodes"}  # older asynchronous trainers of CAGE 2 played whole episodes
EPISODES = 100  # default number of episodes per update in a mode that counts episodes


@dataclass(frozen=True)
class SearchOptions:
    """Search for the best workflow. A workflow is the order of host types (defender, enterprise, op_server, op_host, user) in
    which a defender of CAGE 2 fixes taken hosts. Options of `freewheel train` may follow: --num-envs, --ppo.lr, ..."""

    env: str = "freewheel/Cage2-v0"
    """The environment: freewheel/Cage2-v0, or cyborg:Scenario2 for the real simulator. It may also be given as the first word."""
    red_agent: str = RED_AGENTS[0]
    """The attacker: B_lineAgent, RedMeanderAgent, SleepAgent, or mixture (one of the first two, drawn for every episode). Short
    names such as bline and meander are accepted."""
    max_episode_steps: Annotated[int, COUNT] = 100
    """Number of steps in an episode."""
    strategy: Strategy = "gp"
    """gp: a Gaussian process with an upper confidence bound; greedy: the same without exploration; random: random orders;
    canonical: six plausible orders with equal shares of the episodes; plain: no workflow, all episodes in one run."""
    total_episodes: Annotated[int, COUNT] = 100_000
    """Number of episodes in the whole search."""
    max_episodes_per_workflow: Annotated[int, COUNT] = 10_000
    """Maximum number of episodes for one workflow (gp, greedy, random)."""
    episodes_per_update: Annotated[int | None, COUNT] = None
    """Learn from this many episodes at a time, or from the same number of rows if the mode does not collect whole episodes
    (default: the default of the mode)."""
    alignment_lambda: Annotated[float, Range(least=0, most=1e9)] = WEIGHT
    """Weight of compliance in the reward. An episode that always follows the order earns this much."""
    compliance_threshold: Annotated[float, SHARE] = 0.9
    """Mean compliance at which a workflow counts as learned. An order that stays below has failed and is not tried again."""
    gp_beta: Annotated[float, Range(least=0, most=1e9)] = 2.0
    """Weight of exploration. The upper confidence bound is mean + beta × standard deviation."""
    warm_start: bool = True
    """Start from the weights of the most similar trained order; --no-warm-start starts from random weights."""
    fixed_episodes: bool = False
    """Train every workflow for all its episodes; neither the threshold nor a plateau ends its training."""
    window: Annotated[int, COUNT] = 100
    """Number of episodes over which means are taken. If fewer episodes are left, the search ends."""
    plateau: Annotated[int, Range(least=0, most=10**9)] = 5
    """Stop training a workflow after this many windows without a better return; 0: never."""
    mode: str = "auto"
    """How experience is collected, as in `freewheel train`; auto: continuous on our environment, episodes on the simulator."""
    n_workers: Annotated[int | None, Range(least=1, most=10_000)] = None
    """Number of worker processes in modes that have them (default: chosen from the number of cores and the step time)."""
    seed: Annotated[int, SEED] = 0
    """Seed of all random numbers."""
    run: str = ""
    """Name of the search and of its directory under --runs-dir (default: workflow-STRATEGY with a number)."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    resume: bool = False
    """Resume the search --run after its last finished trial. Only --total-episodes may change."""
    dry_run: bool = False
    """Print the plan and exit."""

    def __post_init__(self) -> None:
        if self.env not in WORLDS:
            raise UsageError(f"'{self.env}' has no workflows{nearest(self.env, WORLDS)}")
        check_ranges(self)
        if "/" in self.run or self.run.startswith("."):
            raise UsageError(f"--run '{self.run}' must be a plain name; --runs-dir chooses the directory")
        find_red(self.red_agent)
        if self.resume and not self.run:
            raise UsageError("--resume needs the name of the search: add --run")

    @property
    def rules(self) -> SearchRules:
        return SearchRules(
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

    def training(self, passed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `freewheel.train` for every trial. Options that the user passed on override ours."""
        world: dict[str, Any] = {"red_agent": find_red(self.red_agent), "alignment_lambda": self.alignment_lambda}
        options: dict[str, Any] = {"preset": PRESET, "evals": 1}
        real = WORLDS[self.env] == REAL
        (world if real else options)["max_episode_steps"] = self.max_episode_steps
        if real:
            options["eval_episodes"] = REAL_EVAL
        mode = "episodes" if real and self.mode == "auto" else MODE_WORDS.get(self.mode, self.mode)
        if mode != "auto":
            options["mode"] = mode
        if mode == "episodes":
            batch = self.episodes_per_update or EPISODES
            options |= {"workers": "auto", "num_envs": "auto", "episodes_per_update": batch}
        if self.n_workers is not None:
            options["workers"] = self.n_workers
        return {**options, "env_args": world, **passed, "env": WORLDS[self.env], "seed": self.seed}


def read(argv: Sequence[str]) -> tuple[SearchOptions, dict[str, Any], list[str]]:
    """Return the options of the search, the options that it passes on to `train`, and the names of all given options."""
    others, given = flags.split_argv(argv, flags.option_types(SearchOptions))
    positional, layer = resolve.read_options(others)
    passed = layer.flags
    if len(positional) + ("env" in given) > 1:
        raise UsageError(f"give one environment, not {' '.join([*positional, *given.get('env', ())])}")
    if positional:
        given["env"] = (positional[0],)
    free = {name: literal(value[0]) for name, value in passed.items() if name.startswith(FREE)}
    return flags.build(SearchOptions, given), {**passed, **free}, [*given, *passed]


#: Options that may be changed when a search is resumed.
CHANGEABLE = ("run", "runs_dir", "resume", "dry_run", "total_episodes")


@dataclass(frozen=True)
class SearchTask:
    """A search: its options, its directory and its state."""

    options: SearchOptions
    training: Mapping[str, Any]  # the options of `freewheel.train`
    book: SearchFiles
    search: WorkflowSearch

    def save(self) -> None:
        asked = {"options": dataclasses.asdict(self.options), "training": dict(self.training)}
        self.book.save(asked, self.search)

    def trainer(self) -> TrialRunner:
        options, book = self.options, self.book
        stops = StopRules(options.compliance_threshold, options.window, options.plateau)
        lengths = {"length": options.max_episode_steps, "before": self.search.spent}
        return TrialRunner(self.training, book.folder, stops, book.train, **lengths)

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        options, searched = self.options, self.search
        if (proposal := searched.propose()) is None:
            return ["search   finished: there is nothing left to try"]
        budget = f"{options.total_episodes:,} episodes, {searched.spent:,} of them used"
        workflows = f"at most {options.max_episodes_per_workflow:,} per workflow"
        return [
            f"search   {options.strategy}: {budget}, {workflows}, to compliance {options.compliance_threshold:g}",
            f"next     {workflow(proposal.order)}, from {proposal.init or 'random weights'}",
            *plan(self.trainer().config(proposal)).lines(),
        ]


def begin(options: SearchOptions, passed: Mapping[str, Any]) -> SearchTask:
    """Begin a new search and choose the numbers of workers and envs for all its trials."""
    name = _name(options)
    if name.path.exists():
        hint = "add --resume to continue it, or choose another --run"
        raise SetupError(f"'{name.name}' exists in {options.runs_dir}; {hint}")
    task = SearchTask(options, options.training(passed), SearchFiles(name.path), WorkflowSearch(options.rules))
    first = task.search.propose()
    assert first is not None, "a new search has something to try"
    sizes = _chosen_sizes(plan(task.trainer().config(first)), options)
    book = task.book if options.dry_run else SearchFiles(name.claim().path)
    return dataclasses.replace(task, training={**task.training, **sizes}, book=book)


def resume(options: SearchOptions, given: Sequence[str]) -> SearchTask:
    """Resume a search that was interrupted."""
    book = SearchFiles(_name(options).path)
    check_folder(book.folder / TRIALS)
    if not book.exists:
        raise UsageError(f"no search '{options.run}' in {options.runs_dir} to resume; leave out --resume")
    for name in given:
        if name not in CHANGEABLE:
            raise UsageError(f"--{name.replace('_', '-')} cannot be changed in a search that is resumed; leave it out")
    asked, trials = book.read()
    changed = {name: getattr(options, name) for name in CHANGEABLE if name in given}
    try:
        known = SearchOptions(**{**asked["options"], **changed})
    except TypeError as error:
        raise SetupError(f"{book.folder} holds a search of another version ({error}); start a new search") from None
    return SearchTask(known, asked["training"], book, WorkflowSearch(known.rules, trials))


def _name(options: SearchOptions) -> RunName:
    place = typed(Path(options.runs_dir))
    if options.run:
        return RunName(place, options.run, exact=True)
    return RunName(place, f"workflow-{options.strategy}").free()


def _chosen_sizes(planned: Plan, options: SearchOptions) -> dict[str, Any]:
    counts = ("workers", "envs_per_worker", "num_envs")
    chosen = {name: value for name, value in flags.values(planned.config.collector).items() if name in counts}
    if options.episodes_per_update is not None and planned.config.mode != "episodes":
        rows = options.episodes_per_update * options.max_episode_steps
        chosen["num_steps_per_env"] = math.ceil(rows / planned.spec.lanes)
    return chosen


def run_command(argv: Sequence[str]) -> int:
    """Run `freewheel workflow search`, or print its plan, and return the exit code."""
    name, *words = argv or [""]
    if name != "search":
        what = f"unknown command 'workflow {name}'" if name else "freewheel workflow needs the word search"
        raise UsageError(f"{what}{nearest(name, ['search'], ', e.g. freewheel workflow search --dry-run')}")
    options, passed, given = read(words)
    task = resume(options, given) if options.resume else begin(options, passed)
    console = Terminal()
    if options.dry_run:
        _print(console, *task.lines())
        return 0
    return _search(task, console)


def _search(task: SearchTask, console: Console) -> int:
    searched, train = task.search, task.trainer()
    session = time.monotonic(), searched.spent

    def trial(proposal: Proposal) -> TrialOutcome:
        begun = workflow(proposal.order) + (f", from {proposal.init}" if proposal.init else "")
        _print(console, f"{which_trial(searched, proposal)}: {begun}, up to {proposal.episodes:,} episodes")
        outcome = train(proposal, TrialProgress(console, searched, proposal, session))
        worth = f"env return {outcome.env_return:.1f}, compliance {_number(outcome.compliance)}"
        _print(console, f"  {worth}; ended by {outcome.ended} after {outcome.episodes:,} episodes")
        return outcome

    task.save()
    task.book.begin_training(len(searched.trials))
    try:
        with _interruptible():
            search.run(searched, trial, task.save)
    except InterruptedSearch as interrupted:
        _print(console, f"interrupted; --run {task.book.folder.name} --resume continues after the last finished trial")
        return interrupted.exit_code
    _report(task, console)
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a signal between two runs raise InterruptedSearch. During a run, the run handles signals."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise InterruptedSearch(SIGNALLED + number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(task: SearchTask, console: Console) -> None:
    """Print all workflows that were tried, and the best one."""
    made, best = task.search, task.search.best
    assert best is not None, "a finished search has at least one trial"
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns wide
    for column in ("workflow", "env return", "compliance", "episodes", ""):
        table.add_column(column, justify="left" if column in ("workflow", "") else "right", no_wrap=True)
    for last in sorted(made.latest, key=lambda one: -one.outcome.env_return):
        outcome, episodes = last.outcome, sum(one.outcome.episodes for one in made.trials if one.order == last.order)
        note = "chosen" if last is best else "failed" if made.failure(last) else ""
        figures = (f"{outcome.env_return:.1f}", _number(outcome.compliance), f"{episodes:,}")
        table.add_row(workflow(last.order), *figures, note)
    console.print(table)
    worth = f"env return {best.outcome.env_return:.1f}, compliance {_number(best.outcome.compliance)}"
    _print(console, f"{workflow(best.order)}: {worth}; freewheel eval {task.book.folder / TRIALS / best.outcome.run}")
    if made.failure(best):
        _print(console, f"no order has reached compliance {made.rules.threshold:g}; this one came closest")


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
