"""The ground has the generated heights, and the sensors agree with a march in small steps along every ray."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.errors import SetupError
from freewheel_drone import terrain as land
from freewheel_drone.terrain import SCAN, Terrain, TerrainConfig, TerrainTile, grow

CFG = TerrainConfig(levels=1, tiles_per_level=1)
CELLS = round(CFG.tile_size / CFG.resolution)
FLAT, HERE = np.zeros((CELLS + 1, CELLS + 1)), torch.zeros(1, dtype=torch.int32)


def world(heights: NDArray = FLAT, pillars: NDArray | None = None, cfg: TerrainConfig = CFG) -> Terrain:
    return Terrain(cfg, [tile(heights, pillars)], "cpu")


def tile(heights: NDArray = FLAT, pillars: NDArray | None = None) -> TerrainTile:
    return TerrainTile(heights, np.empty((0, 3)) if pillars is None else pillars, np.zeros((1, 2, 3)))


def facing(angle: float) -> Tensor:
    return torch.tensor([[math.cos(angle), math.sin(angle)]])


def ground(heights: NDArray, x: NDArray, y: NDArray) -> NDArray:
    """Return bilinear heights, computed in a second way."""
    x, y = (np.clip(along / CFG.resolution, 0, CELLS - 1e-9) for along in (x, y))
    column, row = x.astype(int), y.astype(int)
    x, y = x - column, y - row
    below = heights[row, column] * (1 - x) + heights[row, column + 1] * x
    above = heights[row + 1, column] * (1 - x) + heights[row + 1, column + 1] * x
    value: NDArray = below * (1 - y) + above * y
    return value


def marched(cfg: TerrainConfig, heights: NDArray, pillars: NDArray, eye: NDArray, angle: float) -> NDArray:
    """Return [azimuths, channels] where a march in steps of 5 mm first reaches the ground or a pillar."""
    turns = angle + 2 * np.pi / cfg.lidar_azimuths * np.arange(cfg.lidar_azimuths)[:, None]
    tilts = np.radians(np.linspace(-30, 15, cfg.lidar_channels))
    level = np.cos(tilts)
    rays = np.stack(np.broadcast_arrays(level * np.cos(turns), level * np.sin(turns), np.sin(tilts)), -1)
    out = np.arange(0, cfg.lidar_range, 0.005)
    x, y, z = np.moveaxis(eye + rays[..., None, :] * out[:, None], -1, 0)  # [azimuths, channels, steps]
    hit = z < ground(heights, x, y)
    for px, py, radius in pillars:
        hit |= np.hypot(x - px, y - py) < radius
    reached: NDArray = np.where(hit.any(-1), out[hit.argmax(-1)], cfg.lidar_range)
    return reached


def lidar(terrain: Terrain, eye: NDArray, angle: float, cfg: TerrainConfig = CFG) -> NDArray:
    seen = terrain.look(HERE, torch.tensor(eye[None], dtype=torch.float32), facing(angle)).lidar
    assert seen is not None
    return seen.numpy().reshape(cfg.lidar_channels, cfg.lidar_azimuths).T


@pytest.mark.parametrize("angle", [0.0, 1.0, -2.5])
def test_the_lidar_sees_a_pillar_on_flat_ground_as_a_fine_march_does(angle: float) -> None:
    pillars, eye = np.array([[12.0, 14.0, 0.45]]), np.array([11.3, 12.1, 1.6])
    ours, theirs = lidar(world(pillars=pillars), eye, angle), marched(CFG, FLAT, pillars, eye, angle)
    np.testing.assert_allclose(ours, theirs, atol=0.05)
    assert (theirs[:, -1] < 2.5).any()  # upward rays also hit the pillar
    assert (theirs[:, -1] == CFG.lidar_range).any()
    assert (theirs[:, 0] < 3.3).all()  # downward rays hit the ground


def test_the_lidar_sees_rough_ground_and_many_pillars_as_a_fine_march_does() -> None:
    cfg = dataclasses.replace(CFG, levels=2, tiles_per_level=1)
    rough = grow(cfg, 3)[1]
    terrain = Terrain(cfg, [rough], "cpu")
    errors = []
    for x, y in np.random.default_rng(0).uniform(0.5, 23.5, (5, 2)):
        eye = np.array([x, y, ground(rough.heights, np.array(x), np.array(y)) + 1.2])
        if (np.hypot(*(rough.pillars[:, :2] - eye[:2]).T) > rough.pillars[:, 2]).all():
            errors.append(np.abs(lidar(terrain, eye, x) - marched(cfg, rough.heights, rough.pillars, eye, x)))
    assert np.mean(np.array(errors) < 0.05) > 0.9  # the lidar takes the ground as straight between its points
    assert np.mean(errors) < 0.03
    coarse = Terrain(dataclasses.replace(cfg, lidar_steps=4), [rough], "cpu")
    truth = marched(cfg, rough.heights, rough.pillars, eye, x)
    assert np.abs(lidar(coarse, eye, x) - truth).mean() > 2 * np.abs(lidar(terrain, eye, x) - truth).mean()


def test_channels_and_azimuths_are_as_asked() -> None:
    cfg = dataclasses.replace(CFG, lidar_channels=3, lidar_azimuths=5)
    seen = lidar(world(cfg=cfg), np.array([12.0, 12.0, 1.0]), 0.0, cfg)
    ground, too_far, sky = 2.0, 5.0, 5.0  # under -30°, under -7.5°, above
    np.testing.assert_allclose(seen, [[ground, too_far, sky]] * 5, atol=1e-4)
    assert np.isfinite(lidar(world(FLAT + 1), np.array([12.0, 12.0, 0.5]), 0.0)).all(), "under the ground too"


def test_a_plane_has_its_heights_normal_and_scan() -> None:
    along = np.linspace(0, CFG.tile_size, CELLS + 1)
    terrain = world(0.3 * along + 0.1 * along[:, None])  # 0.3 x + 0.1 y
    angle, position = 0.7, torch.tensor([[10.03, 7.77, 6.0]])
    sight = terrain.look(HERE, position, facing(angle))
    height = 6 - (0.3 * 10.03 + 0.1 * 7.77)
    assert float(sight.height) == pytest.approx(height, abs=1e-4)
    np.testing.assert_allclose(sight.normal[0], np.array([-0.3, -0.1, 1]) / math.sqrt(1.1), atol=1e-5)
    ahead, left = np.tile(SCAN, 5), np.repeat(SCAN, 5)
    x = math.cos(angle) * ahead - math.sin(angle) * left
    y = math.sin(angle) * ahead + math.cos(angle) * left
    assert sight.scan is not None
    np.testing.assert_allclose(sight.scan[0], height - 0.3 * x - 0.1 * y, atol=1e-4)


def test_lanes_look_at_their_own_tiles() -> None:
    terrain = Terrain(CFG, [tile(), tile(FLAT + 1, np.array([[12.0, 12.0, 0.5]]))], "cpu")
    tiles, position = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[12.0, 10.0, 3.0]] * 2)
    height, pillar = terrain.touch(tiles, position)
    assert height[:, 0].tolist() == [3.0, 2.0]
    assert pillar[1, 0] == 1.5
    assert pillar[0, 0] > 100
    sight = terrain.look(tiles, position, facing(0.0).expand(2, 2))
    assert torch.equal(sight.height, height)
    assert torch.equal(sight.pillar, pillar)
    assert sight.closest[1, 0].tolist() == [0.0, 2.0, 0.5]


def test_the_ground_continues_beyond_the_edge() -> None:
    heights = FLAT.copy()
    heights[:, -1] = 2.0
    height, _ = world(heights).touch(HERE, torch.tensor([[1e9, 12.0, 5.0]]))
    assert float(height) == 3.0


def test_every_pillar_in_reach_is_known_everywhere() -> None:
    rough = grow(dataclasses.replace(CFG, levels=2), 0)[1]
    terrain = Terrain(CFG, [rough], "cpu")
    spots = np.random.default_rng(0).uniform(0, CFG.tile_size, (500, 2))
    gaps = np.linalg.norm(rough.pillars[:, :2] - spots[:, None], axis=-1) - rough.pillars[:, 2]
    _, pillar = terrain.touch(HERE.expand(500), torch.tensor(np.c_[spots, np.zeros(500)], dtype=torch.float32))
    near = gaps.min(1) < CFG.lidar_range
    assert near.mean() > 0.9
    np.testing.assert_allclose(pillar[:, 0][near], gaps.min(1)[near], atol=1e-4)


def test_the_same_seed_grows_the_same_tiles_and_another_does_not() -> None:
    one, two, other = grow(CFG, 5)[0], grow(CFG, 5)[0], grow(CFG, 6)[0]
    for field in dataclasses.fields(TerrainTile):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name))
        assert not np.array_equal(getattr(one, field.name), getattr(other, field.name))


def test_levels_grow_rougher_denser_and_wider() -> None:
    tiles = grow(dataclasses.replace(CFG, levels=4), 1)
    roughness = [np.abs(np.diff(tile.heights)).mean() for tile in tiles]
    pillars = [len(tile.pillars) for tile in tiles]
    ways = [np.linalg.norm(tile.episodes[:, 1, :2] - tile.episodes[:, 0, :2], axis=1) for tile in tiles]
    assert roughness == sorted(roughness)
    assert pillars == [4, 16, 28, 40]
    for way, far in zip(ways, (8, 32 / 3, 40 / 3, 16), strict=True):
        assert np.abs(way - far).max() < 1


def test_episodes_begin_and_end_in_the_free() -> None:
    for tile in grow(dataclasses.replace(CFG, levels=3), 2):
        spots = tile.episodes.reshape(-1, 3)
        assert spots.shape == (2 * land.EPISODES, 3)
        gaps = np.linalg.norm(spots[:, None, :2] - tile.pillars[:, :2], axis=-1) - tile.pillars[:, 2]
        assert gaps.min() > land.CLEAR
        assert spots[:, :2].min() >= land.MARGIN
        assert spots[:, :2].max() <= CFG.tile_size - land.MARGIN
        above = spots[:, 2] - ground(tile.heights, spots[:, 0], spots[:, 1])
        np.testing.assert_allclose(above, land.FLIGHT_HEIGHT, atol=0.3)


def test_a_tile_without_room_is_refused() -> None:
    with pytest.raises(SetupError, match="make tile_size larger"):
        grow(dataclasses.replace(CFG, tile_size=5.2), 0)
