"""Workers that want more memory than they may have: named as such, and replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.chaos import every, tokens, trial, world


@pytest.mark.parametrize(("mode", "at"), every((12,), (0,)))
def test_a_worker_that_ran_out_of_memory_is_named_and_replaced(mode: str, at: int, tmp_path: Path) -> None:
    args = {"how": "grows", "only": 1, "at": at, "folder": tokens(tmp_path, 0)}
    with trial(world("Mishap"), mode, workers=3, num_envs=3, env_args=args) as on:
        on.wait_for_workers()
        on.learn(2)
        tokens(tmp_path, 1)
        on.run(lambda: bool(on.supervisor.losses))
        (loss,) = on.supervisor.losses
        assert (loss.worker, loss.given_up) == (1, False)
        words = re.search(
            r"^worker 1 ended \(exit code 1\) and is replaced\nout of memory, peak (\d+) MB$", str(loss), re.M
        )
        assert words is not None, str(loss)
        assert 64 < int(words[1]) < 1024
        on.run(lambda: on.audit.incarnations().get(1) == 1)
        on.learn(2)
        assert len(on.supervisor.losses) == on.supervisor.restarts == 1


def test_a_worker_that_was_killed_may_have_been_out_of_memory() -> None:
    """The kernel's own way to say so is SIGKILL."""
    with trial(
        world("Mishap"), "continuous", workers=2, num_envs=2, env_args={"how": "is killed", "only": 0, "at": 15}
    ) as on:
        on.run(lambda: len(on.supervisor.losses) > 0)
        assert re.fullmatch(
            r"was killed \(SIGKILL; out of memory\? its peak was \d+ MB\)", on.supervisor.losses[0].reason
        )
