"""Tests of `freewheel plot`: files of the requested format from real rows, or one line that says why not."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from freewheel.cli.main import main
from packages.lab.tests.plots.test_curves import make
from tests.support.runs import python

PNG = b"\x89PNG\r\n\x1a\n"


def texts(svg: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (1, 2):
        make(tmp_path / f"a-s{seed}", [(n, n * seed) for n in range(1, 30)], seed=seed)
    make(tmp_path / "b", [(n, 2 * n) for n in range(1, 30)], algo="sac")
    return tmp_path


def test_png_and_svg_are_written_and_name_the_groups(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "a", "b", "--runs-dir", str(runs)]) == 0
    assert capsys.readouterr().out.split() == [str(runs / "curves.png"), str(runs / "curves.svg")]
    assert (runs / "curves.png").read_bytes()[:8] == PNG
    assert {"a (2 seeds)", "b", "environment steps", "wall time", "CartPole-v1"} <= set(texts(runs / "curves.svg"))


def test_one_file_one_axis_and_one_metric(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs / "x.svg"
    assert main(["plot", "b", "--x", "updates", "--y", "return_mean", "--out", str(out), "--runs-dir", str(runs)]) == 0
    assert {"updates", "return"} <= set(texts(out))
    assert "wall time" not in texts(out)
    assert "CartPole-v1" not in texts(out), "the title is the run's name"
    assert not list((runs / "b").glob("curves.*"))
    assert main(["plot", str(runs / "b")]) == 0
    assert len(list((runs / "b").glob("curves.*"))) == 2, "one run keeps its pictures in its directory"


def test_an_empty_run_is_left_out_and_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "b" / "metrics.jsonl").write_text("")
    assert main(["plot", "a", "b", "--runs-dir", str(runs), "--x", "steps"]) == 0
    problem = f"freewheel: {runs}/b has no rows of metrics, so there is nothing to draw"
    assert capsys.readouterr().err == f"{problem}; the run is skipped\n"
    assert "b" not in texts(runs / "curves.svg")
    assert main(["plot", "b", "--runs-dir", str(runs)]) == 1
    assert capsys.readouterr().err == f"freewheel: {runs}/b has no rows of metrics, so there is nothing to draw\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which runs?"),
        (["c"], "no run 'c'"),
        (["b", "--out", "x.pdf"], "--out must end in .png or .svg, not x.pdf"),
        (["b", "--out", "/nowhere/x.png"], "cannot write /nowhere/x.png: No such file or directory"),
        (["b", "--smooth", "0"], "smooth"),
        (["b", "--x", "years"], "--x must be"),
        (["b", "--y", "return_meen"], "did you mean 'return_mean'"),
        (["b", "--y", "eval_return"], "have no values of --y eval_return"),
    ],
)
def test_a_refusal_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plot", *words, "--runs-dir", str(runs)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_group_without_evaluations_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(runs / "c", [(n, 2 * n) for n in range(1, 30)], "eval_return", algo="mbpo")
    assert main(["plot", "b", "c", "--runs-dir", str(runs), "--x", "steps"]) == 0
    assert "b has no return of evaluations" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(runs: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from freewheel.cli.main import main; sys.exit(main() != 1)"
    said = python("-c", code, "plot", "b", "--runs-dir", str(runs)).stderr
    assert said == "freewheel: pictures need matplotlib: pip install 'freewheel-lab[plot]'\n"


def test_pictures_are_the_same_when_made_again_and_dollars_and_missing_letters_are_no_problem(runs: Path) -> None:
    make(runs / "$x^2$-s1", [(1, 1.0), (2, 2.0)], env="$\\frac{倉庫$")
    written = []
    for _ in range(2):
        assert main(["plot", "$x^2$-s1", "--runs-dir", str(runs), "--out", str(runs / "x.svg")]) == 0
        written.append((runs / "x.svg").read_bytes())
    assert written[0] == written[1]
    assert "$x^2$-s1" in texts(runs / "x.svg")
