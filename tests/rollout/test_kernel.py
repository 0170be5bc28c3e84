"""What is compiled does what its Python says, and is there wherever it can be."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.envs.fault_tolerant import finite, numpy_finite
from freewheel.policies.heads.categorical import BELOW_ONE, FastCategorical, NumpyCategorical
from freewheel.policies.spec import ACTIVATIONS
from freewheel.rollout.kernel import PythonRowWriter, RowWriter, compiled

WIDTHS = (5, 7, 6, 9)
BEFORE = 3  # numbers of the flat vector that belong to others
SINGLES = pytest.mark.parametrize("kind", [NumpyCategorical, FastCategorical], ids=["numpy", "compiled"])
PAGES = pytest.mark.parametrize("kind", [PythonRowWriter, RowWriter], ids=["plain", "compiled"])


def vector(seed: int, scale: float = 1.0) -> NDArray:
    size = BEFORE + sum((ins + 1) * outs for ins, outs in pairwise(WIDTHS))
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def logits_of(flat: NDArray, inputs: NDArray, activation: str) -> NDArray:
    """The network in float64, layer by layer."""
    values, start = inputs.astype(np.float64), BEFORE
    for ins, outs in pairwise(WIDTHS):
        weights = flat[start : start + ins * outs].reshape(ins, outs).astype(np.float64)
        start += ins * outs
        values = values @ weights + flat[start : start + outs]
        start += outs
        if outs != WIDTHS[-1]:
            ACTIVATIONS[activation](values, out=values)
    return np.asarray(values)


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    if shutil.which("gcc") is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        pytest.skip("no compiler or no headers")
    assert importlib.util.find_spec("freewheel.rollout._kernel") is not None, "install anew: make clean, make test"
    assert FastCategorical is not NumpyCategorical


def test_without_it_python_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert compiled("FastCategorical", NumpyCategorical) is NumpyCategorical


@SINGLES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_choice_falls_where_the_draw_does(kind: type[NumpyCategorical], activation: str) -> None:
    flat, rng = vector(1), np.random.default_rng(2)
    single = kind(flat, BEFORE, WIDTHS, activation)
    for _ in range(50):
        inputs = rng.standard_normal(WIDTHS[0]).astype(np.float32)
        chances = np.exp(logits := logits_of(flat, inputs, activation))
        ends = np.cumsum(chances) / chances.sum()
        draw = float(rng.random())
        action, log_prob = single.choose(inputs, None, draw)
        assert action == np.searchsorted(ends, draw, side="right") or abs(ends - draw).min() < 1e-5
        assert log_prob == pytest.approx(math.log(chances[action] / chances.sum()), abs=2e-5)
        assert single.choose(inputs, None, None)[0] == logits.argmax()


@SINGLES
def test_weights_are_read_where_they_lie(kind: type[NumpyCategorical]) -> None:
    flat = vector(3)
    single, inputs = kind(flat, BEFORE, WIDTHS, "tanh"), np.ones(WIDTHS[0], np.float32)
    before = single.choose(inputs, None, None)[1]
    flat[:] = vector(4)
    assert single.choose(inputs, None, None)[1] != before
    assert single.choose(inputs, None, None)[0] == logits_of(flat, inputs, "tanh").argmax()


@SINGLES
@pytest.mark.parametrize("draw", [0.0, 0.5, BELOW_ONE, None])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_what_is_masked_is_never_chosen(kind: type[NumpyCategorical], draw: float | None, scale: float) -> None:
    single, inputs = kind(vector(5, scale), BEFORE, WIDTHS, "relu"), np.ones(WIDTHS[0], np.float32)
    for only in range(WIDTHS[-1]):
        mask = np.zeros(WIDTHS[-1], np.float32)
        mask[only] = 1.0
        assert single.choose(inputs, mask, draw) == (only, 0.0)


@SINGLES
def test_extreme_logits_do_no_harm(kind: type[NumpyCategorical]) -> None:
    flat = vector(6, 1e6)
    single, inputs = kind(flat, BEFORE, WIDTHS, "relu"), np.ones(WIDTHS[0], np.float32)
    assert single.choose(inputs, None, 0.999) == (int(logits_of(flat, inputs, "relu").argmax()), 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: FastCategorical(vector(1)[:-1], BEFORE, WIDTHS, "tanh"),
        lambda: FastCategorical(vector(1), BEFORE, (5,), "tanh"),
        lambda: FastCategorical(vector(1), BEFORE, (5, 0, 9), "tanh"),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "sine"),
        lambda: FastCategorical(vector(1).astype(np.float64), BEFORE, WIDTHS, "tanh"),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "tanh").choose(np.zeros(4, np.float32), None, 0.1),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "tanh").choose(np.zeros(5), None, 0.1),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "tanh").choose(np.zeros(10, np.float32)[::2], None, 0.1),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "tanh").choose(np.zeros(5, np.float32), np.ones(9), 0.1),
        lambda: FastCategorical(vector(1), BEFORE, WIDTHS, "tanh").choose(np.zeros(5, np.float32), None, "often"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused(bad: Callable[[], object]) -> None:
    if FastCategorical is NumpyCategorical:
        pytest.skip("not compiled")
    with pytest.raises((ValueError, TypeError, BufferError)):
        bad()


@pytest.mark.parametrize("check", [numpy_finite, finite], ids=["numpy", "compiled"])
def test_finite(check: Callable[[NDArray], bool]) -> None:
    largest = np.finfo(np.float32).max
    for good in ([], [0.0], [1.0, -2.0], [largest, -largest], [1e-45]):
        assert check(np.array(good, np.float32)) is True
    for bad in (math.nan, math.inf, -math.inf):
        for place in range(9):
            values = np.full(9, largest, np.float32)
            values[place] = bad
            assert check(values) is False


@PAGES
@pytest.mark.parametrize(
    ("action", "other"),
    [(3, 7), (np.array([0.5, -1.0], np.float32), np.array([0.25, 2.0], np.float32))],
    ids=["discrete", "box"],
)
def test_rows_of_a_page(kind: type[PythonRowWriter], action: Any, other: Any) -> None:
    rows, first, successor = 3, np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)
    actions = np.zeros((rows, *np.shape(action)), np.asarray(action).dtype)
    obs, next_obs = np.zeros((2, rows, 4), np.float32)
    log_prob, reward = np.zeros((2, rows), np.float32)
    terminated, truncated, valid = np.zeros((3, rows), np.bool_)
    page = kind((obs, actions, log_prob, reward, terminated, truncated, next_obs, valid), first, successor)
    page.see(0, True)
    assert page.put(0, action, -0.5, 0.1, False, True) == float(np.float32(0.1))
    page.see(1, False)
    successor += 10
    assert page.put(1, other, -1.5, 2.0, 1 > 0, 1 < 0) == 2.0
    assert obs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 0, 0, 0]]
    assert next_obs.tolist() == [[4, 5, 6, 7], [14, 15, 16, 17], [0, 0, 0, 0]]
    assert actions[:2].tolist() == [np.asarray(action).tolist(), np.asarray(other).tolist()]
    assert (log_prob.tolist(), reward.tolist()) == ([-0.5, -1.5, 0], [np.float32(0.1), 2, 0])
    assert (terminated.tolist(), truncated.tolist()) == ([False, True, False], [True, False, False])
    assert valid.tolist() == [True, True, False]


def test_a_page_has_no_other_rows() -> None:
    numbers = np.zeros((2, 3), np.float32)
    flags = np.zeros((3, 3), np.bool_)
    obs = np.zeros((2, 3, 2), np.float32)
    columns = (obs[0], np.zeros(3, np.int64), numbers[0], numbers[1], flags[0], flags[1], obs[1], flags[2])
    page = RowWriter(columns, np.zeros(2, np.float32), np.zeros(2, np.float32))
    for t in (3, -4):
        with pytest.raises((IndexError, ValueError)):
            page.put(t, 0, 0.0, 0.0, False, False)
    if RowWriter is not PythonRowWriter:
        with pytest.raises(ValueError, match="bytes"):
            RowWriter(columns, np.zeros(3, np.float32), np.zeros(3, np.float32))
