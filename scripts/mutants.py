"""Forty defects, planted one by one in a copy of the working tree, to see that the tests catch every one of them.

A defect is a small change that breaks a promise. Tests run in stages, the nearest first, and the first that fails ends it:
those of the mirrored place (near), all unit tests (unit), and with --stages all the tiers system and long as well. A test counts
if it fails again with the defect and passes without it. `--check` only sees that every defect can still be planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
ROOMS = ("pacing", "learn", "run", "config")  # pacing and transport; learn; run with checkpoints; config and cli
EACH = 10  # defects of a room
PLANTED = "FREEWHEEL_PLANTED"  # the number of the defect in a copy, where `--check` leaves it out
LIMITS = {"near": 600.0, "unit": 1200.0, "system": 3600.0, "long": 7200.0}  # seconds of a stage: a hang is caught
PARALLEL = ("-n", "2", "--dist", "loadfile")
UNSURE = 3  # tests that may fail for another reason in a stage, before it is given up
TREES = ("tests/", "packages/")  # where tests are
FAILED = re.compile(rf"^(?:FAILED|ERROR) ((?:{'|'.join(TREES)}).+?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5  # exit code of pytest


@dataclass(frozen=True)
class Defect:
    """`old`, which occurs once in the file, becomes `new`; `why`: what is broken then."""

    room: str
    path: str
    old: str
    new: str
    why: str
    elsewhere: str = ""  # tests that do not mirror the file and are tried early

    @property
    def key(self) -> str:
        return f"{self.path}: {self.why}"

    def places(self) -> list[str]:
        """The tests that mirror the file, from the nearest on: folders of tests/, in a package all of its tests as well."""
        parts = Path(self.path).parts
        package = parts[0] == "packages"  # packages/X/src/freewheel_X/...
        path = Path(*parts[:2], "tests", *parts[4:]) if package else Path("tests", *parts[1:])
        mirrored = [path.with_name(f"test_{path.name}"), *list(path.parents)[: -3 if package else -2]]
        return [place.as_posix() for place in mirrored if (ROOT / place).exists()] + self.elsewhere.split()


# fmt: off
DEFECTS = (
    # --------------------------------------------------------------------------------------------- pacing and transport
    Defect("pacing", "freewheel/pacing/pacing.py",
           "version <= self.version - self.max_lag", "version < self.version - self.max_lag",
           "rows may be one version older than --max-lag"),
    Defect("pacing", "freewheel/pacing/lag_bound.py",
           'did not produce."""\n        self._release(worker, tally)',
           'did not produce."""\n        self._stop_acting(worker)',
           "the permits of a worker that has died are not given back"),
    Defect("pacing", "freewheel/pacing/one_ahead.py",
           'max(cells["before"][0] + batch - 1, 0)', "max(batch - 1, 0)",
           "a resumed run forgets how many batches there were, and acts on old versions"),
    Defect("pacing", "freewheel/pacing/episode_queue.py",
           'self.cells["again"][place] = ticket + 1', 'self.cells["again"][place] = ticket',
           "a resumed run plays another episode than the one that was under way"),
    Defect("pacing", "freewheel/pacing/posted.py",
           "            return before\n", "            return before[-1:]\n",
           "a resumed run posts the newest version only, and not the one before it"),
    Defect("pacing", "freewheel/transport/shm/channel.py",
           "self._number[worker], self._begun[worker] = number, end",
           "self._number[worker], self._begun[worker] = number, begin",
           "rows that were taken from an open fragment are taken again"),
    Defect("pacing", "freewheel/transport/shm/memory.py",
           "used = self._weights + rows * self.context[1]", "used = self._weights",
           "contexts that are posted with weights do not arrive"),
    Defect("pacing", "freewheel/transport/workers/worker_slots.py",
           "1 if good >= GOOD_STEPS and not hopeless else slot.failures + 1", "slot.failures + 1",
           "a worker is given up after three failures, whatever it has done between them"),
    Defect("pacing", "freewheel/transport/pool.py",
           "self._signed[fragment.worker] = (incarnation, sequence + 1)",
           "self._signed[fragment.worker] = (incarnation, sequence)",
           "a gap of dropped rows does not show, and learners join what is on both sides of it",
           "tests/collect/test_continuous.py tests/faults/test_backpressure.py"),
    Defect("pacing", "freewheel/transport/clock.py",
           "return now - moment - _overlap(self.not_counted(now), moment, now)", "return now - moment",
           "time-outs count the time in which the machine was asleep"),
    # ------------------------------------------------------------------------------------------------------------ learn
    Defect("learn", "freewheel/learn/ppo/targets.py",
           "gamma * namespace(value).where(terminated, 0, next_value) - value", "gamma * next_value - value",
           "advantages count a future after a true end"),
    Defect("learn", "freewheel/learn/ppo/targets.py",
           "weighted = ratio.clip(max=config.rho_bar) * delta", "weighted = ratio * delta",
           "importance weights of value targets are not clipped"),
    Defect("learn", "freewheel/learn/ppo/numpy_engine.py",
           "self._head.slope(by_log_prob, -coefficients.entropy / rows)",
           "self._head.slope(by_log_prob, coefficients.entropy / rows)",
           "the entropy bonus is a penalty"),
    Defect("learn", "freewheel/learn/ppo/torch_engine.py",
           "gain = torch.minimum(ratio * batch.advantage, limited * batch.advantage)",
           "gain = limited * batch.advantage",
           "the clipped surrogate is no lower bound"),
    Defect("learn", "freewheel/learn/adam.py",
           "            part.copy_(value)\n        self.steps = steps\n", "            part.copy_(value)\n",
           "Adam's count of steps is not restored"),
    Defect("learn", "freewheel/learn/sac/critics.py",
           "self.target.lerp_(self.vector, tau)", "self.target.lerp_(self.vector, 1 - tau)",
           "targets follow the critics at once"),
    Defect("learn", "freewheel/learn/sac/update.py",
           "self.log_temperature.grad = found.excess.reshape(1)",
           "self.log_temperature.grad = -found.excess.reshape(1)",
           "the temperature is steered away from the wanted entropy"),
    Defect("learn", "freewheel/learn/replay/buffer.py",
           "self._span[1].fill_(self.count)", "self._span[1].fill_(self.capacity)",
           "rows are drawn that were never stored"),
    Defect("learn", "freewheel/learn/replay/priority.py",
           ".pow(-self.beta)", ".pow(self.beta)",
           "importance weights of prioritised rows are upside down"),
    Defect("learn", "freewheel/learn/mbpo/fitting.py",
           "elites = least.argsort(stable=True)[: self.config.elites]",
           "elites = least.argsort(stable=True, descending=True)[: self.config.elites]",
           "the worst members of the model are its elites"),
    # -------------------------------------------------------------------------------------------------------------- run
    Defect("run", "freewheel/run/checkpoints/store.py",
           "newest = full or latest is None or not checkpoint.is_full(self.root / str(latest))",
           "newest = full or latest is None or checkpoint.is_full(self.root / str(latest))",
           "`latest` stays at an older checkpoint"),
    Defect("run", "freewheel/run/checkpoints/checkpoint.py",
           "        disk.sync(part)\n", "",
           "a checkpoint gets its name before its files are on the disk"),
    Defect("run", "freewheel/run/checkpoints/segments.py",
           "if (j + 1) * self._rows <= end}", "if j * self._rows <= end}",
           "an open segment counts as closed, and the rows that come later are not saved"),
    Defect("run", "freewheel/run/checkpoints/resume.py",
           "if spent[name] >= limit]", "if spent[name] > limit]",
           "a run that has spent its budget goes on"),
    Defect("run", "freewheel/run/saved.py",
           "disk.cut(file, metrics_size)", "disk.cut(file, metrics_size - 1)",
           "a resumed run cuts a byte too much of its metrics"),
    Defect("run", "freewheel/run/session.py",
           "        earlier.restore_schedule(schedule)\n", "",
           "a resumed run forgets its evaluations and its best weights"),
    Defect("run", "freewheel/run/stopping/ending.py",
           "return SIGNALLED + stopped_by", "return SIGNALLED + signal.SIGINT",
           "the exit code after SIGTERM is that of SIGINT"),
    Defect("run", "freewheel/run/evaluation/episodes.py",
           "np.add(total, step.reward, out=total, where=counts)",
           "np.add(total, step.reward, out=total, where=step.valid)",
           "rewards after the end of an evaluation episode count"),
    Defect("run", "freewheel/run/evaluation/schedule.py",
           "seed = self._last, closing_seed(self._options.eval_seed)", "seed = self._last, self._options.eval_seed",
           "the closing evaluation is on the episodes by which weights were chosen"),
    Defect("run", "freewheel/run/schedule/replay.py",
           "if check.version != learner.version or check.sha256 != fingerprint_of(learner)",
           "if check.version != learner.version and check.sha256 != fingerprint_of(learner)",
           "a replay with other weights is called identical"),
    # --------------------------------------------------------------------------------------------------- config and cli
    Defect("config", "freewheel/config/resolve.py",
           'layers.insert(0, _layer(f"preset {name}", known[name]))',
           'layers.append(_layer(f"preset {name}", known[name]))',
           "a preset wins over what is typed"),
    Defect("config", "freewheel/config/trust.py",
           'if self.use == "nothing" or name in PLAIN:', 'if self.use != "train" or name in PLAIN:',
           "the code of a run that nobody here has signed is imported to play it",
           "tests/faults/test_hostile_files.py"),
    Defect("config", "freewheel/config/flags.py",
           "if option in self.flags:", "if option in self.words:",
           "of an option that is given under two names one is ignored",
           "tests/cli tests/test_migrate.py"),
    Defect("config", "freewheel/config/translation.py",
           "        elif strict:\n", "        elif strict and owner:\n",
           "a word that the algorithm has no option for is ignored",
           "tests/cli tests/test_migrate.py"),
    Defect("config", "freewheel/config/synonyms.py",
           'num_workers": "workers"', 'num_workers": "num_envs"',
           "a word of another library is taken for another option",
           "tests/test_migrate.py"),
    Defect("config", "freewheel/config/auto.py",
           'automatic = [name for name, value in flags.values(options).items() if value == "auto"]',
           "automatic = list(flags.values(options))",
           "what is given is replaced by what is usual"),
    Defect("config", "freewheel/config/machine.py",
           'int(name.partition(":")[2] or 0) >= gpus', 'int(name.partition(":")[2] or 0) > gpus',
           "one GPU more than there are is accepted"),
    Defect("config", "freewheel/cli/eval.py",
           "    def __post_init__(self) -> None:\n        check_ranges(self)\n", "",
           "ranges of the options of eval and play are not checked"),
    Defect("config", "packages/lab/src/freewheel_lab/seeds/campaign.py",
           "group = seeds.group_of(planned, numbers, own.jobs)", "group = seeds.claim(planned, numbers, own.jobs)",
           "--dry-run with --seeds makes the directory and the file of the runs",
           "packages/lab/tests/test_seeds.py"),
    Defect("config", "packages/lab/src/freewheel_lab/seeds/group.py",
           "max(codes, key=lambda code: (code not in (0, 3), code), default=0)", "max(codes, default=0)",
           "a seed that has lost workers hides one that has failed",
           "packages/lab/tests/test_seeds.py"),
)
# fmt: on


def problems(root: Path = ROOT) -> list[str]:
    """Why defects cannot be planted, a line each."""
    found = [f"{room} has {n} defects, not {EACH}" for room in ROOMS if (n := count(room)) != EACH]
    for number, defect in enumerate(DEFECTS):
        path = root / defect.path
        times = path.read_text(encoding="utf-8").count(defect.old) if path.is_file() else 0
        if times != 1 and os.environ.get(PLANTED) != str(number):
            found.append(f"{defect.path} has {times} times, not once: {defect.old!r}")
    return found


def count(room: str) -> int:
    return sum(defect.room == room for defect in DEFECTS)


@dataclass(frozen=True)
class Row:
    """What became of a defect. Without a stage it has survived."""

    room: str
    path: str
    why: str
    stage: str
    test: str
    seconds: float

    def __str__(self) -> str:
        what = f"caught ({self.stage}) by {self.test}" if self.stage else "SURVIVED"
        return f"{self.seconds:6.1f} s  {self.path}: {self.why}: {what}"


class Copy:
    """A copy of the working tree, uncommitted changes included, in which tests run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        kernels = (path.relative_to(ROOT).as_posix() for path in (ROOT / "freewheel" / "rollout").glob("_kernel*.so"))
        for name in {*filter(None, names), *kernels}:
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        # No byte code: a file that is changed twice in a second would not be compiled again.
        folders = [root, *sorted(root.glob("packages/*/src"))]
        others = {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._env = {**os.environ, **others, "OPENBLAS_NUM_THREADS": "1"}
        self._unsure: set[str] = set()  # tests that fail without a defect, or not every time
        modules = ["freewheel", *(f"freewheel_{folder.parent.name}" for folder in folders[1:])]
        script = f"import importlib\nfor name in {modules}: print(importlib.import_module(name).__file__)"
        asked = [sys.executable, "-c", script]
        found = subprocess.run(asked, cwd=root.parent, env=self._env, capture_output=True, text=True, check=True).stdout
        if foreign := [file for file in found.splitlines() if not Path(file).is_relative_to(root)]:
            raise SystemExit(f"mutants: tests would import {', '.join(foreign)}, which is not in the copy")

    def examine(self, number: int, stages: Iterable[tuple[str, Sequence[str]]]) -> Row:
        """Run the stages with this defect until one of them catches it."""
        defect, began = DEFECTS[number], time.monotonic()
        for stage, words in stages:
            if test := self._caught(number, stage, words):
                return Row(defect.room, defect.path, defect.why, stage, test, round(time.monotonic() - began, 1))
        return Row(defect.room, defect.path, defect.why, "", "", round(time.monotonic() - began, 1))

    def _caught(self, number: int, stage: str, words: Sequence[str]) -> str:
        """The test that shows the defect, or why there is no answer from it; empty: none does."""
        for _ in range(UNSURE):
            left_out = [word for test in sorted(self._unsure) for word in ("--deselect", test)]
            all_of_it = [*words, *PARALLEL, *left_out]
            if (failed := self._run(all_of_it, LIMITS[stage], number)) is None:
                return ""
            named = failed.startswith(TREES)
            again = self._run([failed], LIMITS[stage], number) if named else failed
            if again and self._run([failed] if named else all_of_it, LIMITS[stage]) is None:
                return failed
            print(f"{'':10}not counted, it fails without the defect or not every time: {failed}", flush=True)
            if not named:
                return ""
            self._unsure.add(failed)
        return ""

    def _run(self, words: Sequence[str], limit: float, planted: int | None = None) -> str | None:
        """Run tests, perhaps with a defect: the first that fails, else what went wrong; None: all pass."""
        if planted is None:
            return self._pytest(words, limit, self._env)
        defect = DEFECTS[planted]
        path = self.root / defect.path
        whole = path.read_text(encoding="utf-8")
        path.write_text(whole.replace(defect.old, defect.new), encoding="utf-8")
        try:
            return self._pytest(words, limit, {**self._env, PLANTED: str(planted)})
        finally:
            path.write_text(whole, encoding="utf-8")

    def _pytest(self, words: Sequence[str], limit: float, env: Mapping[str, str]) -> str | None:
        line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
        # Not a pipe: what a test leaves behind may hold it open.
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as told:
            own = subprocess.Popen(line, cwd=self.root, env=env, stdout=told, stderr=told, start_new_session=True)
            try:
                code = own.wait(limit)
            except subprocess.TimeoutExpired:
                return f"the limit of {limit:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(own.pid, signal.SIGKILL)
                own.wait()
            told.seek(0)
            output = told.read()
        if code in (0, NO_TESTS):
            return None
        return found[1] if (found := FAILED.search(output)) else f"exit code {code} of pytest"


def stages_of(defect: Defect, until: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The name of each stage, and what to tell pytest."""
    for place in defect.places():
        yield "near", (place, "-m", "unit")
    tiers = {"near": (), "unit": ("unit",), "all": ("unit", "system", "long")}[until]
    for tier in tiers:
        yield tier, ("-m", tier)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    caught, quick = sum(bool(row.stage) for row in rows), sum(row.stage in ("near", "unit") for row in rows)
    lines = [f"{caught} of {len(rows)} planted defects are caught, {quick} of them by unit tests.", ""]
    lines += ["| file | defect | caught by | seconds |", "|---|---|---|---:|"]
    for row in rows:
        by = f"{row.stage}: `{row.test}`" if row.stage else "**survived**"
        about = (row.path.removeprefix("freewheel/"), row.why, by.replace("|", "/"), f"{row.seconds:.0f}")
        lines.append(f"| {' | '.join(about)} |")
    return "\n".join(lines) + "\n"


def newest(file: Path) -> list[Row]:
    """The last row of every defect that is still on the list, in its order."""
    rows = (Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())
    known = {f"{row.path}: {row.why}": row for row in rows}
    return [known[defect.key] for defect in DEFECTS if defect.key in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only see that every defect can be planted")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="defects with it in room, file or reason")
    parser.add_argument("--room", choices=ROOMS, help="the defects of one room")
    parser.add_argument("--stages", choices=("near", "unit", "all"), default="unit", help="how far to go")
    parser.add_argument("--all", action="store_const", const="all", dest="stages", help="the same as --stages all")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="JSON lines, with a table beside it")
    given = parser.parse_args()
    if wrong := problems():
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if given.check:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended as well
    rows = []
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder).resolve() / "tree")
        for number, defect in enumerate(DEFECTS):
            named = not given.only or any(word in f"{defect.room} {defect.key}" for word in given.only)
            if named and given.room in (None, defect.room):
                rows.append(row := copy.examine(number, stages_of(defect, given.stages)))
                print(row, flush=True)
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    if rows:
        given.out.with_suffix(".md").write_text(table(newest(given.out)), encoding="utf-8")
    print("\n" + table(rows), end="")
    return 0 if rows and all(row.stage for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
