"""Checkpoints: round trips, random damage, hostile files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freewheel.core import NDArray
from freewheel.errors import CheckpointError, UsageError
from freewheel.run.checkpoints.checkpoint import (
    COLLECTOR,
    LEARNER,
    MANIFEST,
    POLICY,
    PROGRESS,
    WEIGHTS,
    encode_arrays,
    encode_json,
    fingerprint,
    load,
    load_state,
    make_private,
)
from freewheel.run.checkpoints.store import KEEP, Store

Params = dict[str, NDArray]


def weights(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return {
        "actor.weight": rng.normal(size=(4, 3)).astype(np.float32),
        "actor.bias": rng.normal(size=3).astype(np.float64),
        "steps": np.array(seed, np.int64),
        "mask": np.array([True, False]),
    }


def save(root: Path, step: int, params: Params, about: dict[str, Any], *, best: bool = False, keep: int = KEEP) -> Path:
    return Store(root, keep).save(step, params, about, best=best).folder


def store(root: Path, step: int) -> Path:
    """A checkpoint whose contents follow from its step."""
    return save(root, step, weights(step), {"step": step})


def whole(root: Path, which: str = "latest") -> int:
    """The step that is loaded, after a look at its contents."""
    found = load(root, which)
    assert found.about == {"step": found.step}
    assert fingerprint(found.params) == fingerprint(weights(found.step))
    return found.step


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def list_file(path: Path, name: str, data: bytes) -> None:
    """Change the manifest of a checkpoint so that it lists a file with these contents."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(manifest))


@settings(max_examples=30)
@given(
    params=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        hnp.arrays(
            st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ).map(np.transpose),  # safetensors alone would write the memory as it lies
        max_size=4,
    )
)
def test_any_array_comes_back_bit_for_bit(params: Params, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, about = tmp_path_factory.mktemp("any"), {"env": "A", "hidden": [64, 64], "nested": {"lr": 3e-4, "none": None}}
    path = save(root, 7, params, about)
    found = load(root)
    assert (found.step, found.path, found.about, found.warnings) == (7, path, about, ())
    assert fingerprint(found.params) == fingerprint(params)
    assert all(array.flags.writeable for array in found.params.values())
    assert {name: array.shape for name, array in found.params.items()} == {name: a.shape for name, a in params.items()}


def test_layout_and_links(tmp_path: Path) -> None:
    save(tmp_path, 100, weights(100), {"step": 100}, best=True)
    path = store(tmp_path, 200)
    assert names(tmp_path) == {"100", "200", "latest", "best"}
    assert names(path) == {WEIGHTS, POLICY, MANIFEST}
    assert (os.readlink(tmp_path / "latest"), os.readlink(tmp_path / "best")) == ("200", "100")
    assert (whole(tmp_path), whole(tmp_path, "best"), whole(tmp_path, "100")) == (200, 100, 100)
    listed = json.loads((path / MANIFEST).read_bytes())["files"]
    sizes = {name: (path / name).stat().st_size for name in (WEIGHTS, POLICY)}
    assert {name: entry["size"] for name, entry in listed.items()} == sizes


def test_old_ones_go_but_never_what_a_link_points_to(tmp_path: Path) -> None:
    save(tmp_path, 1, weights(1), {"step": 1}, best=True)
    for step in (2, 3, 10, 20):
        store(tmp_path, step)
    assert names(tmp_path) == {"1", "10", "20", "latest", "best"}
    # A run that went back: what was saved last is the newest, whatever its step, and no name is used again.
    save(tmp_path, 5, weights(5), {"step": 5}, keep=1)
    assert names(tmp_path) == {"1", "5-6", "latest", "best"}
    assert whole(tmp_path) == 5


def test_saving_a_step_again_moves_the_links_only(tmp_path: Path) -> None:
    path = store(tmp_path, 1)
    inode = path.stat().st_ino
    store(tmp_path, 2)
    save(tmp_path, 1, weights(1), {"step": 1}, best=True)
    assert path.stat().st_ino == inode
    assert (whole(tmp_path), whole(tmp_path, "best")) == (1, 1)


def test_a_step_with_other_contents_gets_a_name_of_its_own(tmp_path: Path) -> None:
    """A directory cannot be replaced in one call: for a moment there would be none."""
    save(tmp_path, 1, weights(5), {"step": "wrong"})
    assert store(tmp_path, 1) == tmp_path / "1-2"
    assert (whole(tmp_path), whole(tmp_path, "1-2"), load(tmp_path, "1").about) == (1, 1, {"step": "wrong"})
    (tmp_path / "1-2" / WEIGHTS).write_bytes(b"damaged")
    assert store(tmp_path, 1) == tmp_path / "1-3"
    assert load(tmp_path).warnings == ()
    assert names(tmp_path) == {"1-2", "1-3", "latest"}


def test_what_json_cannot_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(tmp_path / "new", 1, weights(1), {"loss": float("nan")})
    assert names(tmp_path) == set()


def test_folders_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = store(tmp_path / "runs" / "first" / "checkpoints", 1)
        private = make_private(tmp_path / "other")
    finally:
        os.umask(old)
    for folder in (path, *path.parents[:3], private):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_fingerprint_sees_names_types_shapes_and_bytes() -> None:
    zeros = np.zeros(6, np.float32)
    others: list[NDArray] = [zeros, zeros.reshape(2, 3), zeros.view(np.int32), zeros + 1]
    variants: list[Params] = [{}, {"b": zeros}, {"a": zeros[:3], "b": zeros[3:]}, *({"a": other} for other in others)]
    assert len({fingerprint(params) for params in variants}) == len(variants)
    assert fingerprint({"a": zeros, "b": zeros}) == fingerprint({"b": zeros, "a": zeros.copy()})
    assert fingerprint({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_damage_is_refused_or_harmless_and_the_previous_one_takes_over(tmp_path: Path) -> None:
    store(tmp_path, 1)
    path = store(tmp_path, 2)
    files = {name: (path / name).read_bytes() for name in (WEIGHTS, POLICY, MANIFEST)}
    rng = random.Random(7)
    taken_over = 0
    for trial in range(100):
        name = rng.choice(list(files))
        data = bytearray(files[name])
        if trial % 2:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(data)
        found = load(tmp_path)
        if found.step == 1:
            taken_over += 1
            assert str(path if name == MANIFEST else path / name) in found.warnings[0]
            assert found.warnings[-1] == "using step 1 instead of 'latest'"
        assert whole(tmp_path) == found.step
        (path / name).write_bytes(files[name])
    assert taken_over > 90
    assert whole(tmp_path) == 2


@pytest.mark.parametrize("name", [WEIGHTS, POLICY, MANIFEST])
def test_a_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    store(tmp_path, 1)
    (store(tmp_path, 2) / name).unlink()
    found = load(tmp_path)
    assert (found.step, found.warnings[0]) == (1, f"{tmp_path / '2' / name} is missing")


def test_a_missing_or_foolish_link_is_noticed(tmp_path: Path) -> None:
    store(tmp_path, 1)
    store(tmp_path, 2)
    told = "no evaluation has chosen the best weights yet: using step 2 instead of 'best'"
    assert load(tmp_path, "best").warnings == (told,)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "1")  # out of the folder, in principle
    found = load(tmp_path)
    assert (found.step, len(found.warnings)) == (2, 2)
    with pytest.raises(UsageError, match=r"no checkpoint of step 77 .*; available: 2, 1"):
        load(tmp_path, "77")


def test_only_names_made_of_digits_are_looked_at(tmp_path: Path) -> None:
    store(tmp_path, 1)
    for name in (".part-9", "9.tmp", "-9", "09", "9²", "nine"):
        (tmp_path / "1").rename(tmp_path / name)
        with pytest.raises(CheckpointError, match="no checkpoint under"):
            load(tmp_path)
        (tmp_path / name).rename(tmp_path / "1")
    assert whole(tmp_path) == 1


def test_when_nothing_verifies_everything_found_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint under .*missing verifies") as caught:
        load(tmp_path / "missing")
    assert str(caught.value).endswith("latest is missing or is not a link to a step")
    for step in (1, 2):
        (store(tmp_path, step) / POLICY).write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    _, *found = str(caught.value).splitlines()
    complaint = "is damaged: its size or hash is not the manifest's"
    assert found == [f"  {tmp_path / step / POLICY} {complaint}" for step in "21"]


@pytest.mark.parametrize("which", ["../1", "/etc", "", "newest", "1\n"])
def test_which_is_a_word_or_a_number(tmp_path: Path, which: str) -> None:
    with pytest.raises(UsageError, match="ask for latest, best or the number of a step"):
        load(tmp_path, which)


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "..", "", "weights.safetensors/../../x", "extra.bin"])
def test_a_manifest_cannot_name_other_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    list_file(store(tmp_path, 1), name, b"secret")
    with pytest.raises(CheckpointError, match=r"should list the files of a checkpoint, and not"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "3", '{"format": 2, "files": {}}', '{"format": true, "files": {}}', '{"format": 1}',
        '{"format": 1, "files": []}', "[" * 99_999, "\xff",
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (store(tmp_path, 1) / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (WEIGHTS, b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06getcwd\x94\x93\x94)R."),
        (WEIGHTS, b"\xff" * 64),
        (WEIGHTS, b""),
        (WEIGHTS, (59).to_bytes(8, "little") + b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}    \x00\x00'),
        (POLICY, b"[]"),
        (POLICY, b"\x80\x04."),
    ],
)
def test_content_that_is_none_is_refused_even_with_a_matching_hash(tmp_path: Path, name: str, data: bytes) -> None:
    path = store(tmp_path, 1)
    list_file(path, name, data)
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def old(path: Path) -> Path:
    """The same checkpoint as the first format had it."""
    (path / MANIFEST).write_text(json.dumps({**json.loads((path / MANIFEST).read_bytes()), "format": 1}))
    return path


def test_the_first_format_is_read_but_it_had_no_other_files(tmp_path: Path) -> None:
    path = old(store(tmp_path, 1))
    assert whole(tmp_path) == 1
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        load_state(tmp_path)
    list_file(path, "learner.safetensors", b"")
    with pytest.raises(CheckpointError, match=r"should list weights\.safetensors and policy\.json"):
        load(tmp_path)


@pytest.mark.parametrize(("latest", "newest"), [("8", "8"), ("8-2", "8-2"), ("5", "8-2")])
def test_without_order_the_link_says_which_of_a_step_was_saved_last(tmp_path: Path, latest: str, newest: str) -> None:
    """As older runs are, which have used names again; a later step is of a save that was killed before it moved the link."""
    for step in (8, 5, 8):
        path = full(tmp_path, step, keep=3)
        manifest = json.loads((path / MANIFEST).read_bytes())
        (path / MANIFEST).write_text(json.dumps({name: manifest[name] for name in ("format", "files")}))
        path.rename(tmp_path / ("8-2" if step == 8 and (tmp_path / "5").exists() else str(step)))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(latest)
    assert load_state(tmp_path)[0].path.name == load(tmp_path).path.name == newest
    path = full(tmp_path, 8)
    assert load_state(tmp_path)[0].path == load(tmp_path).path == path


def test_a_step_means_what_was_saved_last_at_it(tmp_path: Path) -> None:
    for step in (8, 5, 8, 5):
        path = full(tmp_path, step)
    assert names(tmp_path) == {"8-3", "5-4", "latest"}
    assert (load(tmp_path, "5").path, load(tmp_path, "8").step) == (path, 8)


def test_a_newer_format_is_not_called_damaged(tmp_path: Path) -> None:
    path = store(tmp_path, 1)
    (path / MANIFEST).write_text(json.dumps({**json.loads((path / MANIFEST).read_bytes()), "format": 3, "kind": "new"}))
    told = rf"{path} was written by a newer Freewheel \(format 3\): upgrade this one"
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path)


def full(root: Path, step: int, keep: int = 2) -> Path:
    state = {name: encode_arrays({}) for name in (LEARNER, COLLECTOR)}
    return Store(root, keep).save(step, weights(step), {"step": step}, {**state, PROGRESS: encode_json({})}).folder


def test_latest_is_the_newest_full_one_once_there_is_one(tmp_path: Path) -> None:
    store(tmp_path, 1)
    assert whole(tmp_path) == 1
    full(tmp_path, 2)
    save(tmp_path, 3, weights(3), {"step": 3}, best=True)  # of an evaluation
    assert (whole(tmp_path), whole(tmp_path, "best")) == (2, 3)
    for step in (4, 5, 6):
        full(tmp_path, step)
    assert names(tmp_path) == {"3", "5", "6", "latest", "best"}
    assert load_state(tmp_path)[0].step == whole(tmp_path) == 6


@pytest.mark.parametrize("name", [LEARNER, COLLECTOR, PROGRESS])
def test_a_damaged_state_is_passed_over_and_the_weights_are_still_there(tmp_path: Path, name: str) -> None:
    full(tmp_path, 1)
    (full(tmp_path, 2) / name).write_bytes(b"damaged")
    found, _ = load_state(tmp_path)
    assert (found.step, found.warnings[-1]) == (1, "using step 1 instead of 'latest'")
    assert str(tmp_path / "2" / name) in found.warnings[0]
    assert load(tmp_path).step == 2


def test_leftovers_of_a_killed_save_go_with_the_next_but_not_those_of_another_thread(tmp_path: Path) -> None:
    ours = Store(tmp_path)
    full(tmp_path, 1)
    (tmp_path / ".part-7").mkdir()
    busy, _ = ours._claim(9)
    (tmp_path / ".part-9").mkdir()
    ours.save(2, weights(2), {"step": 2}, best=True)
    assert names(tmp_path) == {"1", "2", ".part-9", "latest", "best"}
    ours._writing.discard(busy)
    ours.save(3, weights(3), {"step": 3}, best=True)
    assert names(tmp_path) == {"1", "3", "latest", "best"}


def test_links_and_pipes_in_place_of_files_are_not_followed(tmp_path: Path) -> None:
    path = store(tmp_path, 1)
    (path / POLICY).rename(tmp_path / "policy")
    for kind in ("link", "pipe"):
        os.symlink(tmp_path / "policy", path / POLICY) if kind == "link" else os.mkfifo(path / POLICY)
        with pytest.raises(CheckpointError, match=f"{POLICY} is (a link|not a regular file)"):
            load(tmp_path)
        (path / POLICY).unlink()
