"""Rough ground with pillars, in tiles of several levels, and the drone's sensors: height, pillars, a height scan and a lidar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.errors import SetupError
from freewheel.seeding import generator

COARSE = 1.0  # m; size of the squares for which nearby pillars are listed
CLEAR = 1.0  # m; smallest gap between two pillars, and between pillars and the start or goal of an episode
MARGIN = 2.5  # m; smallest distance of starts and goals from the edge of a tile
FLIGHT_HEIGHT = 1.75  # m; height of starts and goals above ground
EPISODES = 256  # pairs of start and goal for each tile
SCAN = (-1.0, -0.5, 0.0, 0.5, 1.0)  # m; coordinates of the height scan along both axes of the heading frame
CLOSEST = 4  # pillars that are observed individually
NOWHERE = (1000.0, 1000.0, 0.0)  # stands for a missing pillar


@dataclass(frozen=True)
class TerrainConfig:
    """The ground and the sensors."""

    levels: int = (
        6  # level 0 is nearly flat with few pillars and near goals; the last is rough and dense with far goals
    )
    tiles_per_level: int = 4  # number of different tiles for each level
    tile_size: float = 24.0  # m; the side of a tile, in which an episode takes place
    resolution: float = 0.2  # m between two heights
    lidar: bool = True  # whether the policy observes the lidar, which stays level and turns with the nose
    lidar_channels: int = 8  # number of elevations, evenly from -30 to 15 degrees
    lidar_azimuths: int = 35  # number of directions in a full circle
    # points of the ground that are looked up in each direction; the ground between them counts as straight
    lidar_steps: int = 16
    lidar_range: float = 5.0  # m; larger distances are reported as this
    height_scan: bool = True  # whether policy and critic observe the ground at 5 x 5 points around the drone

    @property
    def elevations(self) -> NDArray:
        """[channels] elevations of the lidar in radians."""
        return np.radians(np.linspace(-30, 15, self.lidar_channels))


@dataclass(frozen=True)
class TerrainTile:
    """A square piece of terrain with its corner at (0, 0)."""

    heights: NDArray  # [C + 1, C + 1] heights of the ground at the corners of C x C cells, by y and x
    pillars: NDArray  # [M, 3] x, y, radius; pillars are higher than drones can fly
    episodes: NDArray  # [E, 2, 3] starts and goals


@dataclass(frozen=True)
class SensorReadings:
    """Sensor readings at N positions."""

    height: Tensor  # [N, 1] height above ground
    pillar: Tensor  # [N, 1] distance to the nearest surface of a pillar
    closest: Tensor  # [N, CLOSEST, 3] dx, dy and radius of nearby pillars, in the map's directions
    normal: Tensor  # [N, 3] normal of the ground below
    scan: Tensor | None  # [N, 25] height above the points of the scan
    lidar: Tensor | None  # [N, channels * azimuths] distances


def grow(cfg: TerrainConfig, seed: int) -> list[TerrainTile]:
    """Create all tiles, level by level."""
    places = itertools.product(range(cfg.levels), range(cfg.tiles_per_level))
    steps = max(cfg.levels - 1, 1)
    return [_grow_tile(cfg, level / steps, generator(seed, "terrain", level, tile)) for level, tile in places]


def _grow_tile(cfg: TerrainConfig, rough: float, rng: np.random.Generator) -> TerrainTile:
    """Create a tile. `rough` is 0 at the first level and 1 at the last."""
    heights = _grow_ground(round(cfg.tile_size / cfg.resolution), rough, rng)
    pillars = _plant(cfg.tile_size, (4 + 36 * rough) / 24.0**2, rng)
    far = (1 / 3 + rough / 3) * cfg.tile_size
    spots = rng.uniform(MARGIN, cfg.tile_size - MARGIN, (64 * EPISODES, 2, 2))
    spots = spots[np.abs(np.hypot(*(spots[:, 1] - spots[:, 0]).T) - far) < 1]
    gaps = np.linalg.norm(spots[:, :, None] - pillars[:, :2], axis=-1) - pillars[:, 2]  # [tries, 2, M]
    spots = spots[(gaps > CLEAR).all((1, 2))][:EPISODES]
    if len(spots) < EPISODES:
        raise SetupError(f"RoughDrone has no room for its episodes in {cfg.tile_size} m; make tile_size larger")
    column, row = np.moveaxis(np.rint(spots / cfg.resolution).astype(int), -1, 0)
    above = heights[row, column] + FLIGHT_HEIGHT
    return TerrainTile(heights, pillars, np.concatenate((spots, above[..., None]), -1))


def _grow_ground(cells: int, rough: float, rng: np.random.Generator) -> NDArray:
    """Create heights [cells + 1, cells + 1] from three octaves of noise, terraces, and a slope."""
    bumps = sum(_noise(cells, knots, rng) / knots for knots in (6, 12, 24)) * 6
    terraces = np.rint(_noise(cells, 8, rng) * 3) / 3
    across = np.linspace(-1, 1, cells + 1)
    slope = rng.uniform(-1, 1, (2, 1)) * across
    ground: NDArray = (0.05 + 0.3 * rough) * bumps + rough * (0.4 * terraces + 0.5 * (slope[0] + slope[1][:, None]))
    return ground


def _noise(cells: int, knots: int, rng: np.random.Generator) -> NDArray:
    """Create noise [cells + 1, cells + 1] between -1 and 1, random at knots x knots points and linear between them."""
    where = np.linspace(0, knots - 1, cells + 1)
    hats = np.maximum(0, 1 - np.abs(where[:, None] - np.arange(knots)))  # [cells + 1, knots]
    noise: NDArray = hats @ rng.uniform(-1, 1, (knots, knots)) @ hats.T
    return noise


def _plant(size: float, density: float, rng: np.random.Generator) -> NDArray:
    """Create pillars [M, 3] with this density per square metre, not too close to each other."""
    pillars = np.empty((0, 3))
    for x, y, radius in rng.uniform((0, 0, 0.2), (size, size, 0.5), (20 * math.ceil(density * size**2), 3)):
        gaps = np.hypot(pillars[:, 0] - x, pillars[:, 1] - y) - pillars[:, 2] - radius
        if len(pillars) < round(density * size**2) and (gaps > CLEAR).all():
            pillars = np.vstack((pillars, (x, y, radius)))
    return pillars


class Terrain:
    """The tiles on a device, and the sensors. No method waits for the device or changes anything.

    The ground is bilinear in its cells. The sensors need it at fixed points of the heading frame: below the drone, at the scan,
    and along each azimuth of the lidar. One gather finds all of them. Along an azimuth, a ray of any elevation ends at the first
    point that is at least as steep as seen from the sensor, so one running maximum serves all channels. Hits of pillars have a
    closed form.
    """

    def __init__(self, cfg: TerrainConfig, tiles: Sequence[TerrainTile], device: str) -> None:
        self._cfg = cfg
        self._cells = tiles[0].heights.shape[0] - 1
        self._squares = math.ceil(cfg.tile_size / COARSE)
        # The start and the goal of every episode, [tiles * E, 6].
        self.episodes = _tensor(np.concatenate([tile.episodes.reshape(-1, 6) for tile in tiles]), device)
        # [cells] of 4 floats each, stored as numbers of 16 bytes: gathering numbers is far faster than gathering short rows.
        ground = np.concatenate([_bilinear(tile.heights) for tile in tiles])
        self._ground = _tensor(ground, device).view(torch.complex128)
        nearby = [_nearby(tile.pillars, self._squares, cfg.lidar_range) for tile in tiles]
        width = max(CLOSEST, *(len(square) for squares in nearby for square in squares), 0)
        padded = [[*square, *[NOWHERE] * (width - len(square))] for squares in nearby for square in squares]
        self._pillars = _tensor(np.array(padded), device)  # [squares, K, 3]

        turns = 2 * math.pi / cfg.lidar_azimuths * np.arange(cfg.lidar_azimuths)
        elevations = cfg.elevations
        ahead = np.stack((np.cos(turns), np.sin(turns)), 1)  # [azimuths, 2]
        out = np.linspace(0, cfg.lidar_range, cfg.lidar_steps + 1)
        self._ahead = _tensor(ahead, device)
        self._out = _tensor(np.maximum(out, 1e-4)[:, None], device)
        self._rise = _tensor(np.tan(elevations), device)
        self._stretch = _tensor(1 / np.cos(elevations)[:, None], device)
        scan = [(x, y) for y in SCAN for x in SCAN] if cfg.height_scan else []
        rays = (ahead * out[:, None, None]).reshape(-1, 2) if cfg.lidar else np.empty((0, 2))
        self._points = _tensor(np.concatenate((np.zeros((1, 2)), np.reshape(scan, (-1, 2)), rays)).T, device)  # [2, P]
        self._shares = [1, len(scan), len(rays)]

    def look(self, tile: Tensor, position: Tensor, yaw: Tensor) -> SensorReadings:
        """Return the sensor readings at positions [N, 3] in tiles [N], with the nose towards yaw [N, 2]."""
        x, y, z = position.chunk(3, 1)
        cosine, sine = yaw.chunk(2, 1)
        ahead, left = self._points
        x = torch.addcmul(x + cosine * ahead, sine, left, value=-1)  # [N, P]
        y = torch.addcmul(y + sine * ahead, cosine, left)
        height, normal = self._heights(tile[:, None], x, y)
        below, scan, rays = torch.split(z - height, self._shares, 1)
        pillars = self._near(tile, position)
        return SensorReadings(
            height=below,
            pillar=_gap(pillars),
            closest=pillars[:, :CLOSEST],
            normal=normal,
            scan=scan if self._cfg.height_scan else None,
            lidar=self._lidar(rays, pillars, yaw) if self._cfg.lidar else None,
        )

    def touch(self, tile: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the height above ground and the distance to the nearest pillar at positions [N, 3] in tiles [N], [N, 1] each."""
        height, _ = self._heights(tile[:, None], position[:, :1], position[:, 1:2])
        return position[:, 2:] - height, _gap(self._near(tile, position))

    def _heights(self, tile: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heights of the ground at points [N, P], and its normal [N, 3] at the first point. Beyond the edge of a tile
        the ground has the height of the edge."""
        last = self._cells - 1
        x, y = ((along / self._cfg.resolution).clamp(0, last + 1) for along in (x, y))
        column, row = (along.int().clamp(max=last) for along in (x, y))
        x, y = x - column, y - row
        cell = torch.add(column, row, alpha=self._cells) + tile * self._cells**2
        level, by_x, by_y, by_both = self._ground.take(cell.long()).view(torch.float32).view(*cell.shape, 4).unbind(-1)
        across = torch.addcmul(by_y, by_both, x)
        height = torch.addcmul(torch.addcmul(level, by_x, x), across, y)
        uphill = torch.addcmul(by_x[:, :1], by_both[:, :1], y[:, :1]), across[:, :1]
        normal = torch.cat((*uphill, torch.full_like(uphill[0], -self._cfg.resolution)), 1)
        return height, torch.nn.functional.normalize(-normal)

    def _near(self, tile: Tensor, position: Tensor) -> Tensor:
        """Return [N, K, 3] dx, dy and radius of every pillar in reach."""
        column, row = (position[:, :2] / COARSE).int().clamp(0, self._squares - 1).unbind(1)
        pillars = self._pillars.index_select(0, (tile * self._squares + row) * self._squares + column)
        return torch.cat((pillars[..., :2] - position[:, None, :2], pillars[..., 2:]), 2)

    def _lidar(self, drop: Tensor, pillars: Tensor, yaw: Tensor) -> Tensor:
        """Return the lidar [N, channels * azimuths], given the drop of the ground at its points [N, (steps + 1) * azimuths]."""
        cfg = self._cfg
        drop = drop.view(-1, cfg.lidar_steps + 1, cfg.lidar_azimuths)
        steepest = torch.cummax(drop / -self._out, 1).values.transpose(1, 2).contiguous()
        rise = self._rise.expand(*steepest.shape[:2], -1).contiguous()  # [N, azimuths, channels]
        # [N, channels, azimuths] the first point of the ground above the ray
        past = torch.searchsorted(steepest, rise).transpose(1, 2)
        after = past.clamp(1, cfg.lidar_steps)
        step, rise = cfg.lidar_range / cfg.lidar_steps, self._rise[:, None]
        over = drop.gather(1, after - 1) + rise * step * (
            after - 1
        )  # height of the ray above the ground before they meet
        under = drop.gather(1, after) + rise * step * after
        ground = step * (after - 1 + over / (over - under).clamp(min=1e-6))
        ground = ground.masked_fill(past > cfg.lidar_steps, cfg.lidar_range)
        reach = torch.minimum(ground, self._pillar_hits(pillars, yaw)[:, None]) * self._stretch
        return reach.clamp(0, cfg.lidar_range).flatten(1)

    def _pillar_hits(self, pillars: Tensor, yaw: Tensor) -> Tensor:
        """Return [N, azimuths] the horizontal distance to the first pillar."""
        dx, dy, radius = pillars.chunk(3, 2)  # [N, K, 1]
        cosine, sine = yaw[:, None].chunk(2, 2)
        forward, left = cosine * dx + sine * dy, cosine * dy - sine * dx
        along = torch.addcmul(forward * self._ahead[:, 0], left, self._ahead[:, 1])  # [N, K, azimuths]
        aside = torch.addcmul(left * self._ahead[:, 0], forward, self._ahead[:, 1], value=-1)
        depth = torch.addcmul(radius.square(), aside, aside, value=-1)
        passes = (depth < 0) | (along < 0)
        return (along - depth.clamp(min=0).sqrt()).masked_fill(passes, self._cfg.lidar_range).amin(1)


def _gap(pillars: Tensor) -> Tensor:
    """Return [N, 1] the distance to the nearest surface of pillars [N, K, 3]."""
    return torch.hypot(pillars[..., 0], pillars[..., 1]).sub(pillars[..., 2]).amin(1, keepdim=True)


def _tensor(values: NDArray, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _bilinear(heights: NDArray) -> NDArray:
    """Return [C * C, 4] the bilinear coefficients of each cell: its height at (0, 0), and the factors of x, y and xy."""
    near = heights[:-1, :-1]
    right = heights[:-1, 1:]
    left = heights[1:, :-1]
    far = heights[1:, 1:]
    return np.stack((near, right - near, left - near, far - right - left + near), -1).reshape(-1, 4)


def _nearby(pillars: NDArray, squares: int, reach: float) -> list[NDArray]:
    """Return for each square, by y and x, the pillars [K, 3] that can be within reach of a point in it, the nearest first."""
    centres = (np.stack(np.meshgrid(np.arange(squares), np.arange(squares)), -1).reshape(-1, 1, 2) + 0.5) * COARSE
    gaps = np.linalg.norm(pillars[:, :2] - centres, axis=-1) - pillars[:, 2]  # [squares², M]
    limit = reach + COARSE / math.sqrt(2)
    return [pillars[np.argsort(gap)[: (gap < limit).sum()]] for gap in gaps]
