"""The picture shows everything at the right place, according to the closed form of both projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import gymnasium
import numpy as np
import pytest
import torch

from freewheel.core import NDArray
from freewheel.envs.device import DeviceEnv
from freewheel.envs.family import register_ids
from freewheel.seeding import training_episodes
from freewheel_drone.canvas import mix
from freewheel_drone.env import RoughDrone
from freewheel_drone.quadrotor import POSITION
from freewheel_drone.render import (
    AHEAD,
    CRASH,
    FOG,
    GOAL,
    INK,
    LAYERS,
    LIDAR,
    MAP,
    MAP_AT,
    OUTCOMES,
    PATH,
    PILLAR,
    PILLARS,
    PLOT,
    PLOT_AT,
    FlightFrame,
    TileScene,
    as_text,
)
from freewheel_drone.task import DroneConfig
from freewheel_drone.terrain import TerrainTile

CFG = DroneConfig(lidar=False)
SIDE = CFG.tile_size
CELLS = round(SIDE / CFG.resolution)
PIXEL = SIDE / MAP  # m; size of a pixel on the map
FLOOR, ROOF = -0.5, 5.0  # m; range of the side view over flat ground
SOIL, _, AIR, HIGH = LAYERS


def tile(*pillars: tuple[float, float, float], slope: float = 0.0) -> TerrainTile:
    heights = np.broadcast_to(np.arange(CELLS + 1) * CFG.resolution * slope, (CELLS + 1, CELLS + 1))
    return TerrainTile(heights, np.reshape(pillars, (-1, 3)), np.empty((0, 2, 3)))


def at(x: float, y: float, z: float = 1.5, **more: Any) -> FlightFrame:
    plain: dict[str, Any] = {
        "tile": 0, "goal": np.array((18.0, 6.0, 1.5)), "seconds": 1.0, "velocity": np.zeros(3), "yaw": np.array((1.0, 0.0)),
        "seen": np.zeros((24, 24), np.bool_), "lidar": None, "reward": 0.5,
    }  # fmt: skip
    return FlightFrame(position=np.array((x, y, z)), **plain | more)


def drawn(flight: Sequence[FlightFrame], ground: TerrainTile | None = None, cfg: DroneConfig = CFG) -> NDArray:
    return TileScene(cfg, ground or tile(), flight[0].goal).draw(flight)


def on_map(picture: NDArray, x: float, y: float) -> tuple[int, ...]:
    """Return the colour of the map at a position."""
    row, column = MAP_AT[1] + (SIDE - y) / SIDE * MAP, MAP_AT[0] + x / SIDE * MAP
    return tuple(picture[int(row), int(column)].tolist())


def on_side(picture: NDArray, along: float, height: float, span: float = 20.0) -> tuple[int, ...]:
    """Return the colour of the side view at a position. The width of the view is a multiple of 5 m, with some room."""
    row, column = PLOT_AT[1] + (ROOF - height) / (ROOF - FLOOR) * PLOT[1], PLOT_AT[0] + along / span * PLOT[0]
    return tuple(picture[int(row), int(column)].tolist())


def ahead(colour: Sequence[int]) -> tuple[int, ...]:
    return tuple(mix(np.array(colour), FOG, AHEAD).tolist())


@pytest.mark.parametrize(("x", "y"), [(4.0, 18.0), (11.3, 0.7), (23.0, 23.5)])
def test_drone_goal_and_pillars_are_where_they_should_be_on_the_map(x: float, y: float) -> None:
    picture = drawn([at(x, y)], tile((9.0, 9.0, 0.5)))
    assert on_map(picture, x, y) == INK
    assert on_map(picture, 18, 6) == GOAL
    assert on_map(picture, 9, 9) == tuple(mix(np.array(PILLAR), FOG, 0.55).tolist())  # not seen yet
    assert on_map(drawn([at(x, y, goal=np.array((2.0, 3.0, 1.0)))]), 2, 3) == GOAL
    assert (picture.shape, picture.dtype.name) == ((480, 960, 3), "uint8")
    assert (drawn([at(x, y)], tile((9.0, 9.0, 0.5))) == picture).all(), "it depends on nothing else"


def test_the_nose_shows_where_it_heads() -> None:
    """The two front rotors have a different colour from the rear ones."""
    arm = 5.5 * PIXEL
    for angle in 0.0, 0.6, 2.0, -2.5:
        yaw = np.array((math.cos(angle), math.sin(angle)))
        left = np.array((-yaw[1], yaw[0]))
        picture = drawn([at(12, 12, yaw=yaw)])
        assert {on_map(picture, *(12 + arm * (yaw + side * left))) for side in (-1, 1)} == {PATH}
        assert {on_map(picture, *(12 + arm * (-yaw + side * left))) for side in (-1, 1)} == {INK}


def test_cells_that_were_seen_are_brighter() -> None:
    seen = np.zeros((24, 24), np.bool_)
    seen[3, 7] = True  # y from 3 to 4, x from 7 to 8
    picture = drawn([at(20, 20, seen=seen)])
    bright = on_map(picture, 7.5, 3.5)
    dark = tuple(mix(np.array(bright), FOG, 0.55).tolist())
    assert [on_map(picture, x, y) for x, y in ((7.05, 3.05), (7.95, 3.95))] == [bright, bright]
    assert [on_map(picture, x, y) for x, y in ((6.95, 3.5), (8.05, 3.5), (7.5, 2.95), (7.5, 4.05))] == [dark] * 4


def test_higher_ground_has_another_colour_and_slopes_have_a_side_in_the_sun() -> None:
    picture = drawn([at(20, 20, seen=np.ones((24, 24), np.bool_))], tile(slope=0.2))
    assert on_map(picture, 2, 12) != on_map(picture, 22, 12)
    towards, away = (sum(on_map(drawn([at(20, 20)], tile(slope=slope)), 12, 12)) for slope in (0.2, -0.2))
    assert towards > away  # the light comes from the north-west


def test_the_way_flown_grows() -> None:
    flight = [at(4 + step, 18) for step in range(8)]
    lengths = []
    for many in range(2, 9):
        picture = drawn(flight[:many])
        lengths.append(int((picture[MAP_AT[1] : MAP_AT[1] + MAP, :468] == PATH).all(-1).sum()))
        assert on_map(picture, 4 + many - 2 + 0.4, 18) == PATH
        assert on_map(picture, 4 + many + 0.4, 18) != PATH
    assert np.diff(lengths).min() > 19  # pixels to a metre


def test_the_side_view_shows_drone_goal_and_ground_by_the_way() -> None:
    picture = drawn([at(4, 6, 1.0), at(8, 6, 3.0)])
    assert on_side(picture, 4, 3.0) == INK
    assert on_side(picture, 2, 2.0) == PATH
    assert on_side(picture, 14, 1.5) == GOAL  # 10 m are left
    for along, seen in ((3.0, tuple), (6.0, ahead)):
        assert on_side(picture, along, -0.2) == seen(SOIL)
        assert on_side(picture, along, 0.2) == seen(AIR)
        assert on_side(picture, along, 4.0) == seen(AIR)


def test_the_ground_of_the_side_view_is_what_the_drone_has_flown_over() -> None:
    """A flight uphill and back the same way shows a mountain."""
    slope, flight = 0.25, [at(4, 6, 4), at(12, 6, 4), at(4, 6, 4)]
    picture = drawn(flight, tile(slope=slope))
    side = TileScene(CFG, tile(slope=slope), flight[0].goal).side(flight)
    assert side.span == 35  # 16 m flown, 14 m to the goal, and a metre of room: more than 1.2 times the way at first
    for along, height in (0.5, 1.125), (4, 2.0), (8, 3.0), (12, 2.0), (15.5, 1.125):
        column, row = side.pixel(along, height)
        colours = picture[PLOT_AT[1] + int(row) - 3 : PLOT_AT[1] + int(row) + 4, PLOT_AT[0] + int(column)].tolist()
        assert tuple(colours[-1]) == SOIL
        assert tuple(colours[0]) == AIR


def test_too_high_is_marked_by_the_ground_below() -> None:
    flight = [at(4, 6, 4), at(12, 6, 4)]
    scene = TileScene(CFG, tile(slope=0.25), flight[0].goal)
    side, picture = scene.side(flight), scene.draw(flight)
    for along, ground in (0.5, 1.125), (7.5, 2.875):
        for above, colour in (0.1, HIGH), (-0.1, AIR):
            column, row = side.pixel(along, ground + CFG.max_height + above)
            assert tuple(picture[PLOT_AT[1] + int(row), PLOT_AT[0] + int(column)].tolist()) == colour


def test_pillars_near_the_way_stand_in_the_side_view() -> None:
    """One pillar is next to the way at 6 m, one is in the way at 12 m, and one at 3 m is too far away."""
    picture = drawn([at(4, 6), at(12, 6)], tile((7, 8, 0.5), (10, 7, 0.5), (16, 6, 0.5)))
    beside, within = (tuple(mix(np.array(AIR), PILLAR, share).tolist()) for share in PILLARS[1:])
    assert on_side(picture, 3, 4) == AIR
    assert on_side(picture, 6, 4) == beside
    assert on_side(picture, 12, 4) == ahead(within)
    assert [on_side(picture, 12 + out, 4) for out in (-0.6, 0.6)] == [ahead(beside)] * 2
    assert on_side(picture, 6, -0.2) == SOIL


def test_lidar_rays_end_at_the_given_distances() -> None:
    """The drone is turned by a quarter: azimuth 0 points north, and azimuth 1/4 points west."""
    cfg = DroneConfig(lidar_channels=4, lidar_azimuths=8)  # elevations -30, -15, 0 and 15
    lidar = np.full((4, 8), cfg.lidar_range)
    lidar[2, 0] = 2.0
    here = 12 + PIXEL / 2  # lines then go through the middles of pixels
    now = at(here, here, yaw=np.array((0.0, 1.0)), lidar=lidar)
    plain, picture = drawn([replace(now, lidar=None)], cfg=cfg), drawn([now], cfg=cfg)

    def laid(x: float, y: float, *shares: float) -> bool:
        """Return whether the lidar's colour covers this position with these shares."""
        colour = np.array(on_map(plain, here + x, here + y))
        for share in shares:
            colour = mix(colour, LIDAR, share)
        return bool(np.abs(colour.astype(int) - on_map(picture, here + x, here + y)).max() <= 1)

    assert laid(0, 1, 0.5)  # north, where there is an echo
    assert laid(0, 2, 0.5, 0.9)
    assert laid(0, 2.3)
    assert laid(-4.5, 0, 0.5)  # west
    assert laid(0, -4.5, 0.5)  # south
    assert laid(-5.3, 0)
    assert laid(2, 1)  # between two rays


@pytest.mark.parametrize("outcome", list(OUTCOMES))
def test_the_outcome_is_shown(outcome: str) -> None:
    picture = drawn([at(4, 6), at(8, 6, outcome=outcome)])
    text = picture[12:40, PLOT_AT[0] :].reshape(-1, 3)
    assert tuple(OUTCOMES[outcome][1]) in {tuple(pixel) for pixel in text.tolist()}
    assert on_map(picture, 8, 6) == on_side(picture, 4, 1.5) == (CRASH if outcome == "crashed" else INK)


@pytest.mark.parametrize("position", [(-3.0, 30.0, 9.0), (18.0, 6.0, 1.5), (float(SIDE), 0.0, -4.0)])
def test_any_place_can_be_drawn(position: tuple[float, float, float]) -> None:
    """These drones are beyond the tile, at the goal, and below the ground."""
    flight = [at(4, 6), at(*position, lidar=np.full((8, 35), 1.0), outcome="crashed")]
    assert drawn(flight, cfg=DroneConfig()).shape == (480, 960, 3)
    assert as_text(CFG, tile(), flight).count("\n") == 24


def test_the_map_as_text() -> None:
    seen = np.zeros((24, 24), np.bool_)
    seen[20:] = True
    flight = [at(4.2, 18.5, seen=seen), at(6.2, 18.5, seen=seen, outcome="late")]
    *rows, figures = as_text(CFG, tile((9.25, 9.5, 0.1)), flight).splitlines()
    assert rows[:4] == [" " * 48] * 4  # north is at the top
    assert rows[24 - 1 - 18] == "." * 8 + "*" + "." * 3 + "D" + "." * 35
    assert rows[24 - 1 - 9] == "." * 18 + "O" + "." * 29
    assert rows[24 - 1 - 6][36] == "G"
    assert figures == "  1.0 s  0.0 m/s  goal in 17.2 m  return 1.0  out of time"


def make(lanes: int = 1, **options: Any) -> RoughDrone:
    small: dict[str, Any] = {"levels": 1, "tiles_per_level": 2, "render_mode": "rgb_array"} | options
    return RoughDrone(lanes, **small)


def shot(env: RoughDrone) -> NDArray:
    picture = env.render()
    assert isinstance(picture, np.ndarray)
    return picture


def flown(env: RoughDrone) -> list[FlightFrame]:
    assert env._camera is not None
    return env._camera.flight


def push(lanes: int = 1, forward: float = 0.5) -> torch.Tensor:
    return torch.tensor([[forward, 0.0, 0.0]] * lanes)


def test_the_world_draws_what_it_is_in() -> None:
    env = make(lidar_azimuths=9)
    env.reset(seed=4)
    goal, start = env.state_tensors()[1][0, :3].tolist(), env.state_tensors()[0][0, POSITION].tolist()
    picture = shot(env)
    assert on_map(picture, *start[:2]) == INK
    assert on_map(picture, *goal[:2]) == GOAL
    for _ in range(5):
        env.step(push())
    later, now = shot(env), env.state_tensors()[0][0, POSITION].tolist()
    assert on_map(later, *now[:2]) == INK
    assert (shot(env) == later).all()
    assert (later != picture).any()


def test_only_the_first_lane_is_drawn_and_nothing_is_changed() -> None:
    one, other = make(3, lidar=False), make(3, lidar=False)
    plain = make(3, lidar=False, render_mode=None)
    for env in one, other, plain:
        env.reset(seed=2)
    other.state_tensors()[0][1:, POSITION] += 0.5
    other.state_tensors()[1][1:, :3] += 2
    for _ in range(4):
        for env in one, other, plain:
            env.step(push(3))
        assert (shot(one) == shot(other)).all()
    assert all(torch.equal(mine, bare) for mine, bare in zip(one.state_tensors(), plain.state_tensors(), strict=True))


def test_the_end_is_shown_until_the_next_episode_is_under_way() -> None:
    """A lane starts again in the step that ends its episode, but the next picture still shows the end."""
    env = make(lidar=False, episode_seconds=0.5)
    env.reset(seed=1)
    for step in range(1, 6):
        _, _, terminated, truncated, _ = env.step(push())
        assert len(flown(env)) == step + 1
    assert truncated[0]
    assert not terminated[0]
    first = flown(env)
    assert [moment.outcome for moment in first] == ["", "", "", "", "", "late"]
    assert [moment.seconds for moment in first] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    env.step(push())
    second = flown(env)
    assert [(moment.seconds, moment.outcome) for moment in second] == [(0.0, ""), (pytest.approx(0.1), "")]
    assert math.dist(first[-1].position, second[0].position) > 0.5
    assert second[0].reward == 0


@pytest.mark.parametrize(("where", "outcome"), [("goal", "success"), ("below", "crashed")])
def test_how_it_ended(where: str, outcome: str) -> None:
    env = make(lidar=False)
    env.reset(seed=1)
    body, task = env.state_tensors()[:2]
    body[0, POSITION] = task[0, :3] if where == "goal" else body[0, POSITION] - 5
    env.step(push(forward=0))
    assert flown(env)[-1].outcome == outcome
    assert flown(env)[-1].reward == pytest.approx(float(env._reward[0]))


def test_nothing_is_done_for_pictures_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(env: RoughDrone) -> NoReturn:
        raise AssertionError("copied from the device")

    monkeypatch.setattr(RoughDrone, "_moment", never)
    env = make(lidar=False, render_mode=None)
    env.reset(seed=1)
    env.step(push())
    assert env.render() is None
    assert env.metadata["capturable"]


def test_a_world_that_is_drawn_is_not_captured() -> None:
    assert not DeviceEnv(make(lidar=False), "drone").capturable
    assert RoughDrone.metadata["capturable"] is True


def test_an_env_of_one_lane_draws_it() -> None:
    register_ids()
    options: dict[str, Any] = {"levels": 1, "tiles_per_level": 1, "lidar": False, "disable_env_checker": True}
    env = DeviceEnv(gymnasium.make("freewheel/RoughDrone-v0", render_mode="ansi", num_envs=2, **options), "drone")
    env.reset([training_episodes(0, lane) for lane in range(2)])
    env.step(torch.zeros(2, 3))
    assert "D" in env.render()
    assert "on its way" in env.render()
