"""Conformance kits, one for each base of core.py: they raise AssertionError if a class breaks its contract."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Protocol, TypeAlias

import numpy as np

from freewheel.core import NO_CONTEXT, Chunk, Collector, Env, EnvSpec, Learner, NDArray, Snapshot, Step, to_numpy
from freewheel.errors import SetupError
from freewheel.registry import with_defaults
from freewheel.rollout.probe import random_actions
from freewheel.seeding import drawn, generator, training_episodes

SEED = 7
STEP = ("reward", "terminated", "truncated", "next_obs", "valid", "measures")  # the arrays of a Step

#: The record of all lanes: their "first" observations [B, D] and, as [T, B, ...], the arrays of their Steps, "over"
#: (whether an episode ended) and "obs" (the observations to act on next).
Played: TypeAlias = dict[str, NDArray]


def check_env(make: Callable[[range], Env], *, steps: int = 200) -> None:
    """Raise AssertionError unless the Env of `make(lanes)` conforms to core.Env over `steps` random steps."""
    lanes = range(2, 5)
    with closing(make(lanes)) as env:
        name, played = env.spec.name, _play(env, lanes, steps, eager=True)
        _check_rows(name, played)
        env.close()
    with closing(make(lanes)) as env:
        again = _play(env, lanes, steps)
        _check_same(name, played, again, "a second instance with the same seeds and actions")
        _check_starts(env, lanes, played)
        _check_clipping(env, lanes)
        _check_context(env, lanes, steps)
    with closing(make(lanes[1:2])) as env:
        alone = _play(env, lanes[1:2], steps)
        beside = {what: values[1:2] if what == "first" else values[:, 1:2] for what, values in played.items()}
        _check_same(name, beside, alone, "the same lane without its neighbours")


def _play(env: Env, lanes: range, steps: int, *, eager: bool = False) -> Played:
    """Play random actions, drawn for each lane so that they do not depend on the other lanes.

    `eager`: call autoreset after every step, not only after the end of an episode.
    """
    spec, draws = env.spec, [generator(SEED, "check_env", lane) for lane in lanes]
    alone = replace(spec, lanes=1)
    first = obs = _seen(spec, "reset", env.reset([training_episodes(SEED, lane) for lane in lanes]).copy())
    rows = []
    for _ in range(steps + 1):  # one more, because a new episode is seen only with the row after the end
        actions = [random_actions(alone, row[None], draw) for row, draw in zip(obs, draws, strict=True)]
        step = env.step(np.concatenate(actions))
        _check_shapes(spec, step)
        _expect(not step.failures, f"{spec.name}: failed with {[failure.report for failure in step.failures]}")
        answer = {name: getattr(step, name).copy() for name in STEP}
        over = step.terminated | step.truncated
        obs = _seen(spec, "autoreset", env.autoreset().copy()) if eager or over.any() else answer["next_obs"]
        changed = [name for name in STEP if answer[name].tobytes() != getattr(step, name).tobytes()]
        _expect(not changed, f"{spec.name}: autoreset changes {changed} of the step before it")
        rows.append(answer | {"over": over, "obs": obs})
    return {"first": first, **{name: np.stack([row[name] for row in rows]) for name in rows[0]}}


def _starts(played: Played, lane: int) -> list[tuple[int, NDArray]]:
    """Return the row of each episode end before the last row, and the next episode's first observation."""
    valid, obs, ends = played["valid"][:, lane], played["obs"][:, lane], np.flatnonzero(played["over"][:-1, lane])
    return [(row, obs[row if valid[row + 1] else row + 1]) for row in ends.tolist()]


def _expect(holds: bool | np.bool_, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _seen(spec: EnvSpec, what: str, array: NDArray) -> NDArray:
    _expect_array(spec, what, array, (spec.lanes, spec.obs_size), spec.obs_dtype)
    return array


def _expect_array(spec: EnvSpec, what: str, array: NDArray, shape: tuple[int, ...], dtype: str) -> None:
    got = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
    _expect(got == f"{dtype} {shape}", f"{spec.name}: {what} is {got}, its spec says {dtype} {shape}")


def _check_shapes(spec: EnvSpec, step: Step) -> None:
    _seen(spec, "next_obs", step.next_obs)
    for name, dtype in (("reward", "float32"), ("terminated", "bool"), ("truncated", "bool"), ("valid", "bool")):
        _expect_array(spec, name, getattr(step, name), (spec.lanes,), dtype)
    _expect_array(spec, "measures", step.measures, (spec.lanes, len(spec.measures)), "float32")


def _check_rows(name: str, played: Played) -> None:
    """Check that next_obs is the true successor, and that rows that are not valid are empty."""
    over, obs, next_obs, gap = played["over"], played["obs"], played["next_obs"], ~played["valid"]
    same = (next_obs == obs).all(-1) | np.isnan(obs).any(-1)
    _expect(same[~gap & ~over].all(), f"{name}: within an episode, next_obs is not what is acted on next")
    _expect(not (gap & over).any(), f"{name}: a row that is not valid ends an episode")
    _expect(not played["reward"][gap].any(), f"{name}: a row that is not valid has a reward")
    after_end = np.concatenate([np.zeros_like(over[:1]), over[:-1]])
    _expect(not (gap & ~after_end).any(), f"{name}: a row is not valid although no episode had just ended")
    ends = [(next_obs[row, lane], start) for lane in range(over.shape[1]) for row, start in _starts(played, lane)]
    remedy = "check more steps, or use shorter episodes"
    _expect(bool(ends), f"{name}: no episode ended in {len(over) - 1} steps: {remedy}")
    confused = bool((obs != obs[0, 0]).any()) and all(np.array_equal(final, start) for final, start in ends)
    mistake = "next_obs is the next episode's first observation, not the last of its own"
    _expect(not confused, f"{name}: at an end, {mistake}")


def _check_same(name: str, one: Played, other: Played, which: str) -> None:
    for what, here in one.items():
        there = other[what]
        if what == "measures":
            here, there = here[one["over"]], there[one["over"]]
        equal = np.array_equal(here, there, equal_nan=here.dtype.kind == "f")
        _expect(equal, f"{name}: '{what}' is not the same for {which}")


def _check_starts(env: Env, lanes: Sequence[int], played: Played) -> None:
    """Check that episode k of a lane begins like a stream that starts at k, independent of earlier episodes."""
    starts = [[start for _, start in _starts(played, lane)] for lane in range(len(lanes))]
    for k in range(1, min(4, 1 + max(map(len, starts)))):
        first = env.reset([training_episodes(SEED, lane, start=k) for lane in lanes])
        for lane, begun in enumerate(starts):
            agrees = len(begun) < k or np.array_equal(begun[k - 1], first[lane], equal_nan=True)
            _expect(agrees, f"{env.spec.name}: episode {k} of lane {lanes[lane]} does not begin as its seed says")


def _check_clipping(env: Env, lanes: range) -> None:
    bounded = np.isfinite(env.spec.action.low)  # empty if actions are discrete
    for sign in (-1, 1) if bounded.any() else ():
        seen = []
        for size in (1, 5):
            env.reset([training_episodes(SEED, lane) for lane in lanes])
            step = env.step(np.tile(np.float32(sign * size * bounded), (len(lanes), 1)))
            seen.append(np.column_stack([step.next_obs, step.reward]))
        same = np.array_equal(seen[0], seen[1], equal_nan=True)
        _expect(same, f"{env.spec.name}: actions outside [-1, 1] are not clipped")


def _check_context(env: Env, lanes: range, steps: int) -> None:
    """Check that an episode shows, until its end, the row that its seed draws from the table set when it began."""
    spec, rng = env.spec, generator(SEED, "check_env", "context")
    columns, width = spec.slice("context"), spec.context
    _check_refusal(env, width + 1)
    if columns is None or not width:
        return
    first, second = np.arange(6 * width, dtype=np.float32).reshape(2, 3, width)
    streams, played, table = [training_episodes(SEED, lane) for lane in lanes], [0] * len(lanes), first
    env.set_context(first)
    obs, rows = env.reset(streams).copy(), np.stack([drawn(first, stream.seed(0)) for stream in streams])
    for turn in range(steps):
        step = env.step(random_actions(spec, obs, rng))
        for seen in (obs, step.next_obs):
            shown = seen[:, columns.start : columns.stop]
            right = np.array_equal(shown[step.valid], rows[step.valid])
            _expect(right, f"{spec.name}: shows the contexts {shown.tolist()}, its episodes have {rows.tolist()}")
        for lane in np.flatnonzero(step.terminated | step.truncated):
            played[lane] += 1
            rows[lane] = drawn(table, streams[lane].seed(played[lane]))
        obs = env.autoreset().copy()
        if turn == steps // 2:
            table = second
            env.set_context(second)
    env.set_context(NO_CONTEXT)


def _check_refusal(env: Env, width: int) -> None:
    """Check that a table of another width is refused, and that an empty one is accepted."""
    env.set_context(NO_CONTEXT)
    try:
        env.set_context(np.zeros((1, width), np.float32))
    except SetupError:
        return
    raise AssertionError(f"{env.spec.name}: takes contexts of {width} numbers, its spec says {env.spec.context}")


class AnyRunner(Protocol):
    """The methods that all runners of rollout/ share."""

    produced: int
    open: int

    def load(self, snapshot: Snapshot) -> None: ...
    def unroll(self, steps: int) -> Chunk: ...
    def close(self) -> None: ...


def check_runner(make: Callable[[], AnyRunner], snapshot: Snapshot) -> None:
    """Raise AssertionError unless chunks are signed, whole, continuous and repeatable, with any snapshot version."""
    runs = []
    for _ in range(2):
        with closing(make()) as runner:
            runner.load(snapshot)
            chunks = [runner.unroll(steps) for steps in (5, 1, 7)]
            _expect(runner.open == 0, "rows are still open after the chunk was handed over")
            _expect(runner.produced == sum(chunk.rows for chunk in chunks), "produced is not the sum of all rows")
        for number, chunk in enumerate(chunks):
            _expect(chunk.version == snapshot.version, "a chunk is not signed with the version that was loaded")
            _expect(chunk.origin.sequence == number, "sequence numbers have a gap")
            _expect(chunk.rows == np.count_nonzero(chunk.data.valid), "rows is not the number of valid rows")
        _check_joints(chunks)
        runs.append(chunks)
    for one, other in zip(*runs, strict=True):
        same = all(np.array_equal(getattr(one.data, f.name), getattr(other.data, f.name)) for f in fields(one.data))
        _expect(same, "two runners with the same seed and weights wrote different rows")


def check_collector(
    make: Callable[[], Collector], snapshot: Callable[[int], Snapshot], *, turns: int = 20, every: int = 3
) -> None:
    """Raise AssertionError unless a mode signs, orders, counts and versions its chunks, and can be left at any time.

    New weights are published after `every` turns; a mode that waits for them needs every=1.
    """
    with make() as collector:
        collector.publish(snapshot(0), 0)
        tables = [snapshot(0).context]
        seen: dict[tuple[int, int], list[Chunk]] = {}
        delivered, published = 0, 0
        for turn in range(turns):
            got = _waited_for(collector)
            for chunk in got:
                seen.setdefault((chunk.origin.worker, chunk.origin.incarnation), []).append(chunk)
                delivered += chunk.rows
                _expect(chunk.version <= published, "a chunk is newer than the weights that were published")
                _check_episodes(chunk, tables)
            rows = collector.rows()
            elsewhere = rows.queued + rows.open + sum(rows.dropped.values())
            _expect(rows.produced == delivered + elsewhere, f"{rows} does not balance with {delivered} delivered")
            if turn % every == every - 1:
                published += 1
                collector.publish(snapshot(published), delivered)
                tables.append(snapshot(published).context)
        lossy = bool(collector.rows().dropped)
        for author, written in seen.items():
            numbers = [chunk.origin.sequence for chunk in written]
            rising = all(here < there for here, there in itertools.pairwise(numbers))
            whole = numbers == list(range(len(numbers)))
            _expect(whole or (rising and lossy), f"{author}: sequence numbers {numbers} are not in order")
            versions = [chunk.version for chunk in written]
            _expect(versions == sorted(versions), f"{author}: versions {versions} go back")
            for run in _runs(written):
                _check_joints(run)
        _expect(published == 0 or any(written[-1].version > 0 for written in seen.values()), "new weights never arrive")
        oldest = collector.oldest()
        _expect(oldest is None or oldest <= published, "oldest() is newer than what was published")


def _check_episodes(chunk: Chunk, tables: Sequence[NDArray]) -> None:
    """Check that the context of every episode is a row of a published table."""
    for episode in chunk.episodes:
        known = [tuple(drawn(table, episode.seed).tolist()) if table.size else () for table in tables]
        _expect(episode.context in known, f"{episode} should have one of the contexts {known}")


def _waited_for(collector: Collector) -> Sequence[Chunk]:
    """Return at least one chunk. A wait may return nothing because `oldest` has moved, but not every time."""
    for _ in range(1000):
        if got := [*collector.collect(wait=True), *collector.collect(wait=False)]:
            return got
    raise AssertionError("collect(wait=True) returned nothing")


def check_learner(make: Callable[[], Learner], collect: Callable[[Snapshot], Chunk]) -> None:
    """Raise AssertionError unless an algorithm counts its rows, increases its version, and can be restored from its state.

    A state does not hold rows that still wait, so chunks must fill batches exactly.
    """
    learner, twin = (with_defaults(make(), Learner) for _ in range(2))
    observed = 0
    for turn in range(3):
        while not learner.ready:
            _expect(learner.hungry, "neither ready nor hungry: the loop could not continue")
            chunk = collect(learner.snapshot())
            learner.observe(chunk)
            observed += chunk.rows
            _expect(0.0 <= learner.buffer_util <= 1.0, f"buffer_util is {learner.buffer_util}, not a share")
        before = learner.snapshot()
        held = {name: np.array(value) for name, value in before.params.items()}
        metrics = learner.update()
        _expect(all(np.isfinite(float(value)) for value in metrics.values()), f"metrics are not finite: {metrics}")
        _expect(learner.version == before.version + 1, "an update did not move the version by one")
        unchanged = all(np.array_equal(held[name], np.asarray(value)) for name, value in before.params.items())
        _expect(unchanged, "an update changed an earlier snapshot")
        _expect(learner.snapshot().version == learner.version, "a snapshot is not of the learner's version")
        rows = learner.rows()
        accounted = rows.trained + rows.queued + sum(rows.dropped.values())
        _expect(accounted == observed, f"turn {turn}: {rows} does not account for {observed} rows observed")
    _expect(learner.rows().queued == 0, "rows still wait: give the kit chunks that fill batches exactly")
    copy_state(learner, twin)
    while not learner.ready:
        chunk = collect(learner.snapshot())
        learner.observe(chunk)
        twin.observe(chunk)
    learner.update()
    twin.update()
    ours, theirs = learner.snapshot(), twin.snapshot()
    same = all(np.array_equal(np.asarray(ours.params[name]), np.asarray(theirs.params[name])) for name in ours.params)
    _expect(same and ours.version == theirs.version, "a learner restored from state_dict behaves differently")


def copy_state(learner: Learner, twin: Learner) -> None:
    """Copy as a resumed run does: first the state, then the rows of buffers."""
    twin.load_state_dict({name: np.array(to_numpy(value)) for name, value in learner.state_dict().items()})
    buffers = twin.buffers()
    for name, buffer in learner.buffers().items():
        first = buffer.added - buffer.count
        buffers[name].write(first, buffer.read(first, buffer.added))


def _runs(chunks: Sequence[Chunk]) -> Sequence[Sequence[Chunk]]:
    """Split the chunks where a sequence number is missing."""
    cuts = [at for at in range(1, len(chunks)) if chunks[at].origin.sequence != chunks[at - 1].origin.sequence + 1]
    return [chunks[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(chunks)))]


def _check_joints(chunks: Sequence[Chunk]) -> None:
    """Check that, unless an episode ends, a row's successor is what the lane acts on next, within and across chunks."""
    for here, there in itertools.pairwise(chunks):
        _expect(here.origin.sequence + 1 == there.origin.sequence, "chunks of one author are not consecutive")
    data = [chunk.data for chunk in chunks]
    obs, successor, valid = (np.concatenate([getattr(d, name) for d in data]) for name in ("obs", "next_obs", "valid"))
    over = np.concatenate([d.terminated | d.truncated for d in data])
    going = valid[:-1] & valid[1:] & ~over[:-1]
    _expect(np.array_equal(successor[:-1][going], obs[1:][going]), "a row does not follow from the row before it")
