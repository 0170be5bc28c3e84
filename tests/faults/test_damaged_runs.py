"""R16 over whole run directories: whichever file of a run is damaged, cut, removed or replaced, what reads the run refuses it in
one line that names the file, or finds exactly what was written; a damaged checkpoint is passed over, and that is said."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freewheel
from freewheel.config import resolve
from freewheel.config.resolve import Config
from freewheel.errors import FileError, FreewheelError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import Linked
from freewheel.run.checkpoints.resume import ResumeSettings, read_earlier
from freewheel.run.saved import open_run
from tests.support.hostile import CHECKPOINTS
from tests.support.places import LONG
from tests.support.runs import train

TRIALS = 1000 if LONG else 100
#: What may be damaged without changing anything that is read: rows for people, and what only says who writes.
UNREAD = ("metrics.jsonl", ".lock", "targets.json")


@dataclass(frozen=True)
class Found:
    """What a reader has found, in a form that can be compared, and what it has warned of."""

    value: object
    warnings: tuple[str, ...] = ()


def plain(value: Any) -> Any:
    """Comparable: arrays by their bits."""
    if isinstance(value, np.ndarray):
        return checkpoint.fingerprint({"": value})
    if isinstance(value, Linked):
        return value.entry
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def acts(run: Path) -> Found:
    """What `eval` and `play` read."""
    opened = open_run(run)
    actor, told = opened.actor()
    chosen = actor.act(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.random.default_rng(0), greedy=True)
    options = opened.config.to_json() | {"sources": None}  # these say where the file is
    return Found((options, plain(chosen.log_prob), chosen.action.tolist()), tuple(told))


def loads(run: Path) -> Found:
    with warnings.catch_warnings(record=True, action="always") as caught:
        policy = freewheel.load(run)
    told = tuple(str(one.message) for one in caught)
    return Found((policy.step, plain(policy.saved.params), policy.saved.about), told)


def goes_on(run: Path) -> Found:
    """What `resume` reads before it begins."""
    config, earlier, left = read_earlier(open_run(run, usual="latest", use="train"), ResumeSettings())
    state = earlier.state
    value = (config.to_json(), left, plain(earlier.saved.params), plain(vars(state)))
    return Found(value, earlier.saved.warnings)


READERS: Mapping[str, Callable[[Path], Found]] = {"eval": acts, "load": loads, "resume": goes_on}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SAC, so that there are segments; two full checkpoints and a best one."""
    sac = {"learning_starts": 16, "batch": 8, "updates_per_row": 0.25, "buffer": 100}
    options: dict[str, Any] = {"algo": "sac", "sac": sac, "policy": {"hidden": [8]}, "run": "it"}
    options |= {"max_episode_steps": 10}
    runs = tmp_path_factory.mktemp("runs")
    first = train(runs, "Pendulum-v1", mode="sequential", steps=64, num_envs=2, num_steps_per_env=8, **options)
    return freewheel.resume(first, steps=128, quiet=True).path


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """A config that is not damaged is parsed once: that takes a tenth of a second."""
    known: dict[tuple[bytes, str], Config] = {}

    def from_file(path: Path, *given: Any, **how: Any) -> Config:
        content = path.read_bytes(), repr((path.parent.name, given, how))
        if content not in known:
            known[content] = resolve.from_file(path, *given, **how)
        return known[content]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freewheel.run.saved.from_file", from_file)
        yield


@pytest.fixture(scope="module")
def whole(run: Path) -> Mapping[str, Found]:
    return {name: read(run) for name, read in READERS.items()}


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() or path.is_symlink())


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice((0, 1, rng.randrange(len(data)), len(data) - 1))])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def grow(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 9, 1000))))


def scramble(path: Path, rng: random.Random) -> None:
    """A block of the disk that belongs to something else."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 512] = rng.randbytes(len(data[start : start + 512]))
    path.write_bytes(data)


def repoint(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(("nowhere", "../config.json", "/etc", "999", ".")))


DAMAGES = (flip, flip, flip, cut, remove, grow, scramble)


def damage(path: Path, rng: random.Random) -> str:
    if path.is_symlink():
        chosen = rng.choice((remove, repoint))
    else:
        if path.stat().st_nlink > 1:  # of a segment that several checkpoints share, or they would all be damaged
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        chosen = rng.choice(DAMAGES) if path.stat().st_size else rng.choice((remove, grow))
    chosen(path, rng)
    return chosen.__name__


def judged(read: Callable[[Path], Found], run: Path, path: Path, whole: Found) -> tuple[str, str]:
    """What became of it ("same", "passed over", "refused"), and what is wrong with that; empty: nothing."""
    try:
        found = read(run)
    except FreewheelError as error:
        told, became = str(error), "refused"
    except Exception as error:  # noqa: BLE001 - what is looked for
        return "foreign", repr(error)
    else:
        if found.value == whole.value:
            return "same", ""
        told, became = "\n  ".join(found.warnings), "passed over"
        if path.parent == run:
            return became, "another file was believed"
    first, *more = told.splitlines() or [""]
    named = str(path) in told or str(path.parent) in told  # a folder whose manifest is none
    named = named or (path.name in ("best", "latest") and f"instead of '{path.name}'" in told)
    short = all(len(line) < 600 for line in (first, *more)) and all(line.startswith("  ") for line in more)
    return became, "" if named and short else f"it was told: {told}"


@pytest.mark.timeout(300)
def test_no_damage_to_a_run_goes_unnoticed(run: Path, whole: Mapping[str, Found], tmp_path: Path) -> None:
    rng, copy, seen = random.Random(16), tmp_path / "it", Counter[str]()
    names = [path.relative_to(run) for path in files_of(run)]
    wrong = []
    for trial in range(TRIALS):
        name = names[trial % len(names)]
        shutil.copytree(run, copy, symlinks=True)
        what = damage(copy / name, rng)
        if (what, name.name) == ("remove", "summary.json"):  # as if the run had been killed before its end
            shutil.rmtree(copy)
            continue
        for reader, read in READERS.items():
            became, reason = judged(read, copy, copy / name, whole[reader])
            seen[became] += 1
            if became != "same" and name.name in UNREAD:
                reason = "it should not matter"
            if reason:
                wrong.append(f"{reader}, {what} {name}: {became}: {reason}")
        shutil.rmtree(copy)
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert min(seen[became] for became in ("same", "passed over", "refused")) > TRIALS // 20, seen


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "it", symlinks=True))


def test_weights_that_the_network_does_not_have_are_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 GB, as file and manifest say, on a machine that could hold them."""
    monkeypatch.setattr("freewheel.files.read.free_memory", lambda: 1 << 60)
    CHECKPOINTS["weights are 40 GB of nothing"](copy)
    told = r"weights\.safetensors has 4[0-9.]+ GB by its manifest, but the network of"
    with pytest.raises(FreewheelError, match=told):
        open_run(copy).actor()


def test_a_newest_checkpoint_that_is_gone_is_told(copy: Path, whole: Mapping[str, Found]) -> None:
    newest = (copy / "checkpoints" / "latest").resolve()
    shutil.rmtree(newest)
    found = goes_on(copy)
    assert found.value != whole["resume"].value
    assert f"{newest} is missing" in found.warnings[0].replace(str(copy), str(newest.parents[1]))


def test_rows_of_metrics_that_are_gone_are_told(copy: Path, whole: Mapping[str, Found]) -> None:
    (copy / "metrics.jsonl").write_bytes(b"")
    found = goes_on(copy)
    assert found.value == whole["resume"].value
    assert found.warnings == (f"{copy / 'metrics.jsonl'} is shorter than when the run was saved: rows of it are lost",)


def test_a_config_that_was_changed_on_purpose_is_used_without_its_checksum(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"seed": 5}))
    with pytest.raises(FileError, match=r"config\.json has changed since it was written, .* take 'sha256' out of it"):
        open_run(copy)
    del config["sha256"]
    (copy / "config.json").write_text(json.dumps(config | {"seed": 5}))
    assert open_run(copy).config.run.seed == 5
