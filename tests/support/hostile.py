"""Run directories as an attacker, a bad disk or a careless editor would make them, by name: each is a change of a good one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.numpy

Change: TypeAlias = Callable[[Path], None]

#: What runs when it is imported, called, or unpickled leaves a file of this name in the current directory.
CANARY = "executed"
PAYLOAD = f"""
from pathlib import Path
Path({CANARY!r}).touch()
class World:
    def __init__(self, **arguments): ...
    def reset(self, **arguments): ...
    def step(self, action): ...
class Net:
    def __init__(self, spec): ...
class Listener:
    def on_start(self, run): ...
def reward(obs, action, next_obs): ...
"""
COMMAND = f"touch {CANARY}"


class _Executes:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (COMMAND,)


PICKLE = pickle.dumps(_Executes())
DEEP = "[" * 100_000 + "]" * 100_000


def reseal(folder: Path) -> None:
    """Write sizes and hashes of a checkpoint's files into its manifest, as one would who has changed them on purpose."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        if (folder / name).is_file() and (folder / name).stat().st_size < 1 << 30:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def checkpoints(run: Path) -> list[Path]:
    return [path for path in (run / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink()]


def _text(name: str, text: str | bytes) -> Change:
    def change(run: Path) -> None:
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))

    return change


def _config(**values: Any) -> Change:
    def change(run: Path) -> None:
        config = json.loads((run / "config.json").read_text()) | values | {"sha256": "LEAVE OUT"}  # as one who means it
        (run / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value != "LEAVE OUT"})
        )

    return change


def _in_checkpoints(name: str, make: Callable[[Path], object], *, sealed: bool = True) -> Change:
    """Change a file of every checkpoint: `make` gets its path."""

    def change(run: Path) -> None:
        for folder in checkpoints(run):
            make(folder / name)
            if sealed:
                reseal(folder)

    return change


def _policy(place: str, value: Any) -> Change:
    """Set a field of policy.json, given by a path of keys; value "LEAVE OUT" removes it."""

    def make(path: Path) -> None:
        about = json.loads(path.read_text())
        target, *_ = [about]
        *keys, last = place.split("/")
        for key in keys:
            target = target[int(key) if isinstance(target, list) else key]
        if value == "LEAVE OUT":
            del target[last]
        else:
            target[last] = value
        path.write_text(json.dumps(about))

    return _in_checkpoints("policy.json", make)


def _weights(change: Callable[[dict[str, Any]], object]) -> Change:
    def make(path: Path) -> None:
        arrays = safetensors.numpy.load_file(path)
        change(arrays)
        path.write_bytes(safetensors.numpy.save(arrays))

    return _in_checkpoints("weights.safetensors", make)


def _manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    def make(path: Path) -> None:
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return _in_checkpoints("manifest.json", make, sealed=False)


def _sparse(path: Path) -> None:
    """40 GB, as the manifest and the file's own header say, and on the disk almost nothing."""
    floats = 10 * 2**30
    header = json.dumps(
        {"actor.0.weight": {"dtype": "F32", "shape": [floats], "data_offsets": [0, 4 * floats]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * floats)
    manifest = path.with_name("manifest.json")
    listed = json.loads(manifest.read_text())
    listed["files"][path.name]["size"] = path.stat().st_size
    manifest.write_text(json.dumps(listed))


def _replaced(kind: str, name: str) -> Change:
    def change(run: Path) -> None:
        path = run / name
        content = path.read_bytes()
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            (run.parent / "elsewhere").write_bytes(content)
            path.symlink_to(run.parent / "elsewhere")

    return change


def _nan(arrays: dict[str, Any]) -> None:
    arrays["actor.0.weight"][0, 0] = np.nan


def _swap(name: str, array: Any) -> Callable[[dict[str, Any]], object]:
    return lambda arrays: arrays.update({name: array})


def _without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _checkpoints_is_a_file(run: Path) -> None:
    _without_checkpoints(run)
    (run / "checkpoints").write_text("x")


#: Whose config.json is wrong: what needs it must refuse.
CONFIGS: Mapping[str, Change] = {
    "config is empty": _text("config.json", ""),
    "config is no JSON": _text("config.json", "{nope"),
    "config is a pickle": _text("config.json", PICKLE),
    "config is nested lists": _text("config.json", f'{{"env": {DEEP}}}'),
    "config is nested objects": _text("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "config is a list": _text("config.json", "[]"),
    "config is null": _text("config.json", "null"),
    "config has NaN": _text("config.json", '{"env": "CartPole-v1", "seed": NaN}'),
    "config has 1e999": _text("config.json", '{"env": "CartPole-v1", "minutes": 1e999}'),
    "config has a key twice": _text("config.json", '{"env": "CartPole-v1", "env": "os:system"}'),
    "config is huge": _text("config.json", '{"env": "CartPole-v1"}' + " " * (17 << 20)),
    "config is UTF-16": _text("config.json", '{"env": "CartPole-v1"}'.encode("utf-16")),
    "config has half a surrogate": _text("config.json", '{"env": "\\ud800"}'),
    "config is a pipe": _replaced("pipe", "config.json"),
    "config is a folder": _replaced("folder", "config.json"),
    "config is a link": _replaced("link", "config.json"),
    "config has no env": _config(env="LEAVE OUT"),
    "config: env is null": _config(env=None),
    "config: env is a number": _config(env=3),
    "config: env is a list": _config(env=[]),
    "config: env is an object": _config(env={"a": 1}),
    "config: env is unknown": _config(env="Nowhere-v9"),
    "config: env is a text of 1 MB": _config(env="x" * 10**6),
    "config: unknown option": _config(gravity=3),
    "config: algo is unknown": _config(algo="magic"),
    "config: algo is a list": _config(algo=[[]]),
    "config: mode is unknown": _config(mode="magic"),
    "config: steps is text": _config(steps="many"),
    "config: steps is negative": _config(steps=-1),
    "config: ppo is a list": _config(ppo=[1]),
    "config: hidden is text": _config(policy={"hidden": "wide"}),
    "config: env_args is a list": _config(env_args=[1]),
    "config: eval_max_steps is 0": _config(eval_max_steps=0),
    "config: context is text": _config(context="[[1"),
}
#: Whose config.json names code.
CODE: Mapping[str, Change] = {
    "config: env is os:system": _config(env="os:system", env_args={"command": COMMAND}),
    "config: env is subprocess:run": _config(env="subprocess:run", env_args={"args": COMMAND, "shell": True}),
    "config: env is a module's": _config(env="payload:World"),
    "config: env is a file's": _config(env="./payload.py:World"),
    "config: env is a file": _config(env="./payload.py"),
    "config: env is registered by a module": _config(env="payload:World-v0"),
    "config: env is a batched one": _config(env="torch:payload:World"),
    "config: env is a task": _config(env="isaaclab:payload:World"),
    "config: env gets code": _config(env_args={"env_id": ["payload:World-v0"]}),
    "config: env gets a file": _config(env_args={"xml_file": "/etc/passwd"}),
}
#: Whose checkpoint is wrong.
CHECKPOINTS: Mapping[str, Change] = {
    "policy: no policy": _policy("policy", "LEAVE OUT"),
    "policy: policy is text": _policy("policy", "MLP"),
    "policy: an extra key": _policy("policy/more", 1),
    "policy: a missing key": _policy("policy/hidden", "LEAVE OUT"),
    "policy: hidden is text": _policy("policy/hidden", "wide"),
    "policy: hidden is huge": _policy("policy/hidden", [10**9, 10**9]),
    "policy: hidden is 0": _policy("policy/hidden", [0]),
    "policy: hidden is deep": _policy("policy/hidden", [[[]]]),
    "policy: obs_size is negative": _policy("policy/obs_size", -4),
    "policy: obs_size is huge": _policy("policy/obs_size", 10**18),
    "policy: obs_size is beyond 64 bits": _policy("policy/obs_size", 10**25),
    "policy: columns beyond the end": _policy("policy/actor_columns", [[0, 400]]),
    "policy: columns are empty": _policy("policy/actor_columns", []),
    "policy: head is unknown": _policy("policy/head", "os:system"),
    "policy: activation is unknown": _policy("policy/activation", "eval"),
    "policy: log_std is null": _policy("policy/log_std", None),
    "policy: no version": _policy("version", "LEAVE OUT"),
    "policy: version is a list": _policy("version", [3]),
    "policy: layout is text": _policy("layout", "columns"),
    "policy: layout without observation": _policy("layout/observation", "LEAVE OUT"),
    "policy: layout of objects": _policy("layout/action/dtype", "object"),
    "policy: layout of no dtype": _policy("layout/action/dtype", "system"),
    "policy: layout with an extra key": _policy("layout/observation/parts/0/more", 1),
    "policy: layout of a huge part": _policy("layout/observation/parts/0/stop", 10**15),
    "policy: layout of a part of another shape": _policy("layout/observation/parts/0/shape", [2, 2, 2]),
    "policy: layout of other actions": _policy("layout/action/size", 5),
    "policy is nested": _in_checkpoints("policy.json", lambda path: path.write_text(f'{{"policy": {DEEP}}}')),
    "policy is a list": _in_checkpoints("policy.json", lambda path: path.write_text("[]")),
    "policy is a pickle": _in_checkpoints("policy.json", lambda path: path.write_bytes(PICKLE)),
    "policy is missing": _in_checkpoints("policy.json", lambda path: path.unlink(), sealed=False),
    "weights are a pickle": _in_checkpoints("weights.safetensors", lambda path: path.write_bytes(PICKLE)),
    "weights are empty": _in_checkpoints("weights.safetensors", lambda path: path.write_bytes(b"")),
    "weights are 40 GB of nothing": _in_checkpoints("weights.safetensors", _sparse, sealed=False),
    "weights are truncated": _in_checkpoints("weights.safetensors", lambda one: one.write_bytes(one.read_bytes()[:-9])),
    "weights have NaN": _weights(_nan),
    "weights have none": _weights(lambda arrays: arrays.clear()),
    "weights of another shape": _weights(_swap("actor.0.weight", np.zeros((1, 1), np.float32))),
    "weights of another type": _weights(_swap("actor.0.bias", np.zeros(64, np.int64))),
    "weights without a layer": _weights(lambda arrays: arrays.pop("actor.1.weight")),
    "manifest is newer": _manifest(lambda manifest: manifest.update(format=99)),
    "manifest: format is text": _manifest(lambda manifest: manifest.update(format="1")),
    "manifest: files is a list": _manifest(lambda manifest: manifest.update(files=[])),
    "manifest: no files": _manifest(lambda manifest: manifest.pop("files")),
    "manifest: a path outside": _manifest(lambda kept: kept["files"].update({"../../config.json": {"size": 1}})),
    "manifest: an absolute path": _manifest(lambda manifest: manifest["files"].update({"/etc/passwd": {"size": 1}})),
    "manifest: entries are text": _manifest(lambda manifest: manifest["files"].update({"weights.safetensors": "x"})),
    "manifest: a negative size": _manifest(lambda manifest: manifest["files"]["policy.json"].update(size=-1)),
    "manifest: a hash of no text": _manifest(lambda manifest: manifest["files"]["policy.json"].update(sha256=5)),
    "manifest is nested": _in_checkpoints("manifest.json", lambda path: path.write_text(DEEP), sealed=False),
    "manifest is missing": _in_checkpoints("manifest.json", lambda path: path.unlink(), sealed=False),
    "checkpoints are missing": _without_checkpoints,
    "checkpoints is a file": _checkpoints_is_a_file,
}
#: Whose checkpoint names code.
MODULES: Mapping[str, Change] = {
    "policy: module is os:system": _policy("policy/module", "os:system"),
    "policy: module is a module's": _policy("policy/module", "payload:Net"),
    "policy: module is a file's": _policy("policy/module", "./payload.py:Net"),
}
