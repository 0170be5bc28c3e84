"""A timeline made by hand: four workers, one of them slow, a learner that waits for it, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from freewheel.timeline.model import Row, Span, Timeline


class Clock:
    """Time by hand, in ns."""

    now = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now

    def passes(self, ns: int) -> tuple[int, int]:
        begin, self.now = self.now, self.now + ns
        return begin, self.now


ABOUT = {
    "step": "The environments' step().",
    "wait-gate": "Waits at a barrier or for the others: their steps take longer.",
    "wait-data": "Waits for rows: the environments are the slower ones.",
    "update": "Gradient steps of the agent.",
}


def made(workers: int = 4, rounds: int = 10) -> Timeline:
    """Rounds of a second: worker w steps (w + 1) / (workers + 1) s, then waits for the last one; then an update of the rest."""
    last = workers / (workers + 1)
    rows = [Row(f"worker {worker}", "envs", list(_worker(worker, workers, rounds))) for worker in range(workers)]
    slow = f"worker {workers - 1}"
    learner, gpu, collector = [], [], []
    for turn in range(rounds):
        learner += [Span("wait-data", turn, turn + last, slow), Span("update", turn + last, turn + 1.0)]
        gpu.append(Span("update", turn + last, turn + 1.0))
        collector += [Span("wait-gate", turn, turn + last - 0.01, slow), Span("take", turn + last - 0.01, turn + last)]
    others = [Row("learner", "learner", learner), Row("GPU", "gpu", gpu), Row("collector", "sync", collector)]
    return Timeline([*rows, *others], ABOUT, 0.0, float(rounds))


def _worker(worker: int, workers: int, rounds: int) -> Iterator[Span]:
    stepping = (worker + 1) / (workers + 1)
    for turn in range(rounds):
        yield Span("infer", turn, turn + 0.02)
        yield Span("step", turn + 0.02, turn + stepping)
        yield Span("wait-credit", turn + stepping, turn + 1.0, "learner")
