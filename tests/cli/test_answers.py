"""What the command line answers, by a table: command, exit code, first line of the answer; among files of the user."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from freewheel.cli import main as cli

FILES = {
    "myenvs.py": """
        import time
        import helper
        from tests.support.worlds import Counter

        class Warehouse(Counter):
            def __init__(self, mean_ms: float = 0.0, size: int = 3) -> None:
                super().__init__()
                assert mean_ms in (0.0, helper.MEAN_MS)

            def step(self, action):
                return super().step(action)

            def reset(self, *, seed=None, options=None):
                return super().reset(seed=seed, options=options)
    """,
    "helper.py": "MEAN_MS = 5",
    "two.py": """
        import gymnasium as gym
        class Small(gym.Env[int, int]): ...
        class Large(Small): ...
        class Config: ...
    """,
    "none.py": "x = 1",
    "broken.py": "import helper\nhelper.nothing",
    "unfit.py": """
        import gymnasium as gym
        from tests.support.worlds import Counter

        class Agents(Counter):
            possible_agents = ["a", "b"]

        def vector(): return gym.make_vec("CartPole-v1", num_envs=2)
    """,
    "needy.py": "import no_such_package_anywhere",
    "wrong.py": "class (:",
}


@dataclass(frozen=True)
class Case:
    """One row: words after `freewheel`, the exit code, and a pattern of the first line (of stdout if all went well)."""

    command: str
    code: int
    answer: str


#: Messages of an own environment.
OWN = [
    Case("train myenvs:Warehouse --dry-run", 0, r"world    myenvs:Warehouse: 2 observation columns"),
    Case("train ./myenvs.py:Warehouse --dry-run", 0, r"world    myenvs:Warehouse: "),
    Case("train ./myenvs.py --mode batch --workers 1 --dry-run", 0, r"world    myenvs:Warehouse: "),
    Case("train myenvs:Warehouse --env.mean-ms 5 --dry-run", 0, r"world    myenvs:Warehouse: "),
    Case(
        "train myenvs:Warehouse --env.mean-s 5", 1,
        r"myenvs:Warehouse does not accept the arguments \{'mean_s': 5\}: .* unexpected keyword argument 'mean_s'; "
        r"did you mean 'mean_ms'\? it takes mean_ms, size$",
    ),
    Case("train two.py", 2, r"two.py has 2 environments, Small, Large: say which, e.g. two.py:Large$"),
    Case("train ./none.py", 2, r"none.py defines no environment: name a class or a function that makes one, none.py:Name$"),
    Case("train wrong.py", 2, r"wrong.py is not Python: invalid syntax"),
    Case("train nothing.py", 2, r"cannot read nothing.py: No such file or directory$"),
    Case("train ./myenv.py:Warehouse", 1, r"there is no file .*/myenv.py; did you mean 'myenvs.py'\?$"),
    Case("train myenv:Warehouse", 1, r"cannot import 'myenv': there is no module 'myenv'; did you mean 'myenvs'\?$"),
    Case("train quite.another:Warehouse", 1, r"cannot import 'quite.another': there is no module 'quite': install it, go to "),
    Case("train myenvs:Warehous", 1, r"'.*myenvs.py' has no factory 'Warehous'; did you mean 'Warehouse'\?$"),
    Case("train broken:World", 1, r"cannot import '.*broken.py': it raised AttributeError: module 'helper' has no attribute"),
    Case("train needy:World --mode batch", 1, r"cannot import '.*needy.py': it imports 'no_such_package_anywhere', which is not"),
]  # fmt: skip

WORLD = "train tests.support.worlds"
#: Messages of an environment that does not survive its first steps.
FIRST_STEPS = [
    *(
        Case(
            f"{WORLD}:Hangs --env.at 1 --step-timeout 0.5 --mode {mode}", 1,
            r"tests.support.worlds:Hangs did not return within 0.5 s from step 1 of the episode with seed 38257410; is it "
            r"waiting for something\? --step-timeout allows more$",
        )
        for mode in ("sequential", "continuous")
    ),
    *(
        Case(f"{WORLD}:Dies --env.at 2 --mode {mode}", 1, r"tests.support.worlds:Dies was killed \(SIGKILL\) in step 2 of")
        for mode in ("lockstep", "batch", "episodes")
    ),
    Case(f"{WORLD}:Hangs --env.at 0 --reset-timeout 0.5", 1, r".*:Hangs did not return within 0.5 s from reset\(\) with seed 0"),
    Case(f"{WORLD}:Raises --env.at 2", 1, r"lane 0 of tests.support.worlds:Raises raised ValueError: boom \(episode 9, seed "),
]  # fmt: skip

#: Words of other libraries, and options of another mode, algorithm or world.
WORDS = [
    Case("train CartPole-v1 --tau 1", 2, r"--tau is an option of mbpo or sac, not of ppo; leave it out"),
    Case("train CartPole-v1 --sac.lr 1", 2, r"--sac.lr is an option of sac, and this run learns with ppo; write --ppo.lr"),
    Case("train CartPole-v1 --sac.tau 1", 2, r"--sac.tau .* with ppo; add --algo sac or leave it out"),
    Case("train CartPole-v1 --workers 4", 2, r"--workers is an option of mode batch, .* or ray, not of lockstep; add "),
    Case("train CartPole-v1 --num-workers 4", 2, r"--num-workers, read as --workers, is an option of mode batch, .* or ray"),
    Case("train CartPole-v1 --learning-rate fast", 2, r"--learning-rate, read as --ppo.lr, must be a number, not fast$"),
    Case("train CartPole-v1 --algo sac --ent-coef auto_0.1", 2, r"--ent-coef, .* say --sac.first-temperature 0.1, from which"),
    Case("train CartPole-v1 --algo a2c", 2, r"there is no algorithm 'a2c': say --algo ppo; with --ppo.epochs 1 "),
    Case("train CartPole-v1 --mode Batch --algo PPO --policy.activation ReLU --dry-run", 0, r"world    CartPole-v1: "),
    Case("train --hidden 128,128 CartPole-v1 --steps 100k --dry-run", 0, r"world    CartPole-v1: "),
    Case("train CartPole-v1 --net-arch [12,8] --print-config", 0, r"\{"),
    Case("train CartPole-v1 --policy.net-arch 12 8 --dry-run", 0, r"world    CartPole-v1: "),
    Case("train CartPole-v1 --hidden 12,x", 2, r"give one environment, not CartPole-v1 12,x$"),
    Case("train CartPole-v1 --size 12", 2, r"unknown option --size; see --help, or say --env.size if it is an argument of "),
    Case("eval one --deterministic", 2, r"there is no --deterministic: leave it out"),
    Case("eval one --n-eval-episodes 5", 2, r"there is no --n-eval-episodes: say --episodes N$"),
    Case("watch one --host 0.0.0.0", 2, r"there is no --host: leave it out: the page is for this machine alone"),
    Case("timeline one --out x.html", 2, r"there is no --out: say --html FILE$"),
    Case("train CartPole-v1 --clip-actions 1", 2, r"--clip-actions is an option of .* environments, and CartPole-v1 is none "),
    Case("train CartPole-v1 --learnin-rate 1", 2, r"unknown option --learnin-rate; did you mean '--learning-rate'\?"),
    Case("train CartPole-v1 --n-envs 2 --num-envs 3", 2, r"--num-envs is given twice, once under another name; leave one out"),
    Case("train CartPole-v1 --device cuda:99", 1, r"--device cuda:99: torch sees .* here; use --device \w+"),
    Case("train CartPole-v1 --device gpu", 2, r"--device must be auto, cpu, cuda, cuda:N or a list such as .*, not gpu"),
    Case("train Isaac-Ant-v0", 2, r"Isaac-Ant-v0 is a task of Isaac Lab: write isaaclab:Isaac-Ant-v0"),
    Case("train --task=Isaac-Ant-v0 --headless", 2, r"Isaac-Ant-v0 is a task of Isaac Lab: write isaaclab:Isaac-Ant-v0"),
    Case("train freewheel/Cage2-v0 --red-agent blin", 2, r"unknown red agent 'blin'; .*B_lineAgent.*"),
]  # fmt: skip


#: What `train` would refuse is refused by a dry run, and by several seeds before any of them starts.
REFUSED = [
    case
    for also in ("--dry-run", "--seeds 1..3")
    for case in (
        Case(f"train CartPole-v1 --algo sac --policy.head squashed {also}", 1, r"policy.head squashed does not fit .*; use auto"),
        Case(f"train CartPole-v1 --policy.module nosuch:Net {also}", 1, r"policy.module 'nosuch:Net' cannot be imported"),
        Case(f"train CartPole-v1 --sinks nosuch {also}", 2, r"unknown sink 'nosuch'"),
        Case(f"train CartPole-v1 --init nosuch {also}", 2, r"no run 'nosuch' in runs; train one first"),
        Case(f"train Pendulum-v1 --algo sac --mode batch --workers 1 --sac.publish-every 3 {also}", 2,
             r"sac.publish_every 3 has to be .* in mode batch; leave it out"),
    )
]  # fmt: skip
#: Mistakes at the front door, and of commands about runs and seeds.
SMALL = [
    Case("train CartPole-v1 --seeds 5..1", 2, r"--seeds must be like 1..5 or 1,2,7 \(at most 1000 seeds\), not 5..1$"),
    Case("train CartPole-v1 --seeds 1..2 --seed 3", 2, r"give --seed or --seeds, not both$"),
    Case("train CartPole-v1 --jobs 2", 2, r"--jobs is the number of runs of --seeds side by side; add --seeds or leave it out$"),
    Case("eval nosuch other --json", 2, r"no run 'nosuch' in runs; train one first$"),
    Case("help shares", 0, r"Shares of time, as in the bars at the end of a run"),
    Case("train --help max-lag", 0, r"--max-lag"),
    Case("train --help wandb-project-name", 0, r"--wandb-project  "),
    Case("train --help nosuchword", 2, r"nothing in the help of train is about 'nosuchword'; freewheel train --help lists all$"),
    Case("workflow", 2, r"freewheel workflow needs the word search, e.g. freewheel workflow search --dry-run$"),
    Case("learn", 2, r"there is no command 'learn': say freewheel train ENV$"),
    Case("train unfit.py:Agents", 1, r"unfit:Agents has several agents \(PettingZoo\), which is not "),
    Case("train unfit.py:vector", 1, r"unfit:vector is a vector of environments, which is not"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the user's files; their modules are forgotten afterwards."""
    for name, text in FILES.items():
        lines = text.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        (tmp_path / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.parametrize("case", [*OWN, *FIRST_STEPS, *REFUSED, *SMALL, *WORDS], ids=lambda case: case.command)
def test_the_answer(case: Case, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(case.command.split())
    out, err = capfd.readouterr()
    line = (out if case.code == 0 else err.removeprefix("freewheel: ")).partition("\n")[0]
    assert (code, bool(re.match(case.answer, line))) == (case.code, True), out + err
    assert not (folder / "runs").exists()
