"""The README is made of what is executed or made again: its table and its picture are held to the benchmarks' rows, its first
steps are walked by scripts/walk.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.headlines import BEGIN, END, headlines, latest
from benchmarks.timeline import PICTURE, draw
from scripts.walk import blocks, commands
from tests.support.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_one_that_the_rows_give() -> None:
    assert README.partition(BEGIN)[2].partition(END)[0].strip() == headlines()


def test_make_bench_ends_with_the_table_also_when_a_target_was_missed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho "$2" >> {tmp_path}/calls\ntest "$2" != benchmarks.lag\n""")
    python.chmod(0o755)
    words = ["make", "--no-print-directory", "-o", ".venv/.bench", "bench", f"BIN={tmp_path}"]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) > 15
    assert calls[-1] == "benchmarks.headlines"
    assert "targets missed in: lag" in made.stdout
    assert made.returncode == 2


def test_the_picture_is_the_one_that_the_rows_give() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(latest("timeline"))


def test_the_first_steps_are_short_and_whole() -> None:
    written = {block.split()[1] for language, block in blocks() if language == "python"}
    ran = [words for language, block in blocks() if language == "sh" for words in commands(block)]
    assert written == {"warehouse.py", "drive.py"}
    assert [words[0] for words in ran] == ["python3", "pip", "pip", "freewheel", "freewheel", "freewheel", "python"]
    assert ran[1][2] in (ROOT / "constraints.txt").read_text().splitlines()  # the torch that the suite is tested with
    assert max(len(block.splitlines()) for _, block in blocks()) <= 20
