"""What is exported acts as the policy does: in a Python that has no Freewheel, and as an ONNX graph."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import freewheel
from freewheel.cli import main as cli
from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError
from freewheel.policies.layout import Layout
from freewheel.policies.spec import Activation, FlatParams, PolicyConfig, full_layout, initialise
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.export import export, loader
from freewheel.run.policy import Policy
from tests.support.kinds import KINDS, Kinds
from tests.support.runs import train

ACTIVATIONS: tuple[Activation, ...] = ("tanh", "relu", "elu", "silu")
ALONE = """
import importlib.util, sys
sys.path[:0] = sys.argv[1:]
import numpy as np
assert importlib.util.find_spec("freewheel") is None and importlib.util.find_spec("torch") is None
for folder in sys.stdin.read().split("\\n"):
    spec = importlib.util.spec_from_file_location("predict", folder + "/predict.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    np.save(folder + "/actions.npy", module.predict(**np.load(folder + "/given.npz")))
"""


def drawn_policy(kind: str, network: PolicyConfig, path: Path) -> Policy:
    """A policy for these spaces whose weights and statistics are drawn at random, so that observations decide."""
    with closing(GymConfig("tests.support.kinds:Kinds", {"kind": kind}).make(range(1))) as env:
        world, spec = env.spec, network.resolve(env.spec)
    params, rng = FlatParams(full_layout(spec)), np.random.default_rng(1)
    initialise(spec, params, rng)
    for name, view in params.views.items():
        if name.endswith(".weight"):
            view[...] = rng.normal(0, 0.3, view.shape)
    for start, stop in spec.normalised:
        params.views["norm.mean"][start:stop] += rng.normal(0, 0.2, stop - start)
        params.views["norm.scale"][start:stop] *= rng.uniform(0.5, 12.0, stop - start)
    about = {"policy": spec.to_json(), "env": world.name, "layout": dict(world.layout), "version": 3}
    return Policy(Checkpoint(640, dict(params.views), about, path), Layout.from_json(world.layout))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    """A policy for every kind of space; they take turns with activations and normalised observations."""
    made, path = dict[str, Policy](), tmp_path_factory.mktemp("nowhere")
    for number, kind in enumerate(KINDS):
        head = "squashed" if kind in ("scaled", "critic") else "auto"
        normalised = number % 2 == 0 or kind == "picture"
        network = PolicyConfig(activation=ACTIVATIONS[number % 4], normalize_obs=normalised, head=head)
        made[kind] = drawn_policy(kind, network, path)
    return made


@pytest.fixture(scope="module")
def exported(policies: dict[str, Policy], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every policy's files, with observations to act on."""
    folders, root = dict[str, Path](), tmp_path_factory.mktemp("exports")
    for kind, policy in policies.items():
        folders[kind] = export(policy, root / kind.replace(" ", "-"))
        env = Kinds(kind)
        seen = [env.reset(seed=seed) for seed in range(20)]
        given: dict[str, Any] = {"obs": np.stack([policy.columns(obs) for obs, _ in seen])}
        if policy.spec.mask is not None:
            masks = [info.get("action_mask", obs["action_mask"] if "obs" in kind else 0) for obs, info in seen]
            given["mask"] = np.stack(masks)
        np.savez(folders[kind] / "given.npz", **given)
        expected = [policy.predict(obs, mask=info.get("action_mask"))[0] for obs, info in seen]
        np.save(folders[kind] / "expected.npy", np.stack(expected))
    return folders


@pytest.fixture(scope="module")
def alone(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of every predict.py, from a Python that finds numpy and safetensors and nothing else."""
    packages = tmp_path_factory.mktemp("packages")
    for package in (np, safetensors):
        (packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    libraries = Path(str(np.__file__)).parent.parent / "numpy.libs"
    if libraries.is_dir():
        (packages / libraries.name).symlink_to(libraries)
    script = packages / "alone.py"
    script.write_text(ALONE)
    subprocess.run(
        [sys.executable, "-I", "-S", str(script), str(packages)],
        input="\n".join(map(str, exported.values())), text=True, check=True, timeout=60,
    )  # fmt: skip
    return {kind: np.load(folder / "actions.npy") for kind, folder in exported.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_acts_as_the_policy(exported: dict[str, Path], alone: dict[str, Any], kind: str) -> None:
    expected = np.load(exported[kind] / "expected.npy")
    assert alone[kind].dtype == expected.dtype
    assert len(np.unique(expected, axis=0)) > 1
    np.testing.assert_allclose(alone[kind], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_loaded_and_documented(policies: dict[str, Policy], exported: dict[str, Path], kind: str) -> None:
    obs, info = Kinds(kind).reset(seed=3)
    mask = info.get("action_mask")
    for run in (exported[kind], exported[kind] / "policy.json"):
        again = freewheel.load(run)
        np.testing.assert_array_equal(again.predict(obs, mask)[0], policies[kind].predict(obs, mask)[0])
        assert again.step == policies[kind].step
    columns = json.loads((exported[kind] / "policy.json").read_text())["inputs"]["obs"]
    assert [column["start"] for column in columns] == [0, *(column["stop"] for column in columns[:-1])]
    assert columns[-1]["stop"] == np.load(exported[kind] / "given.npz")["obs"].shape[1]


def test_the_loader_of_a_plain_network_is_ten_lines(policies: dict[str, Policy]) -> None:
    code = [line for line in loader(policies["start"]).partition('"""\n\n')[2].splitlines() if line.strip()]
    assert len(code) <= 11, "imports among them"


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_acts_as_the_policy(
    policies: dict[str, Policy], exported: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    from onnx import load
    from onnx.reference import ReferenceEvaluator

    graph = load(str(export(policies[kind], tmp_path / "out", "onnx") / "policy.onnx"))
    given = {name: value.astype(np.float32) for name, value in np.load(exported[kind] / "given.npz").items()}
    (answer,) = ReferenceEvaluator(graph).run(None, given)
    actions = np.asarray(answer)
    expected = np.load(exported[kind] / "expected.npy")
    assert (actions.dtype, actions.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)


def test_a_missing_onnx_is_named(policies: dict[str, Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = r"^--format onnx needs a package that is missing: pip install 'freewheel\[onnx\]'$"
    with pytest.raises(SetupError, match=told):
        export(policies["box"], tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_a_network_of_ones_own_cannot_be_written(tmp_path: Path) -> None:
    policy = {"module": "tests.support.custom_module:Shared"}
    result = train(tmp_path, steps=64, evals=0, mode="sequential", policy=policy)
    with pytest.raises(SetupError, match=r"has a network of your own \(tests.support.custom_module:Shared\), which"):
        export(freewheel.load(result, "latest"), tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, steps=64, evals=1, mode="sequential").path
    assert cli.main(["export", str(run)]) == 0
    names = ("manifest.json", "policy.json", "predict.py", "weights.safetensors")
    assert capsys.readouterr().out.split() == [str(run / "export" / name) for name in names]
    assert cli.main(["export", run.name, "--runs-dir", str(tmp_path)]) == 0, "an export is replaced"
    assert sorted(path.name for path in run.iterdir() if "export" in path.name) == ["export"]
    assert cli.main(["export", str(run), "--which", "latest", "--out", str(tmp_path / "deep" / "er")]) == 0
    assert freewheel.load(tmp_path / "deep" / "er").spec == freewheel.load(run).spec
    capsys.readouterr()
    for argv, line in (
        (["export"], "which run? freewheel export NAME, a directory under runs/"),
        (["export", "a", "b"], "give one run, not a b"),
        (["export", str(run), "--out", str(run)], f"{run} exists and is not an export; choose another --out"),
        (
            ["export", str(run), "--out", "/proc/x"],
            "cannot write /proc/x: No such file or directory; choose another --out",
        ),
        (["export", str(run / "export")], f"{run / 'export'} is not a run: say where to write with --out"),
    ):
        assert cli.main(argv) == 2
        assert capsys.readouterr().err == f"freewheel: {line}\n"


def test_nothing_that_is_not_an_export_is_replaced(policies: dict[str, Policy], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not an export"):
        export(policies["box"], tmp_path)
    with pytest.raises(UsageError, match="exists and is not an export"):
        export(policies["box"], tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "mine"
