"""Draw an episode of the drone: the tile from above, the flight from the side, a few figures and a legend.

Everything here is numpy on plain data, so the same episode gives the same bytes on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.core import NDArray
from freewheel_drone import canvas
from freewheel_drone.canvas import Colour
from freewheel_drone.task import DroneConfig
from freewheel_drone.terrain import TerrainTile

WIDTH = 960
HEIGHT = 480
EDGE = 12
MAP = HEIGHT - 2 * EDGE  # width and height in pixels of the tile from above
PLOT = 440, 240  # size in pixels of the side view
MAP_AT, PLOT_AT = (EDGE, EDGE), (WIDTH - EDGE - PLOT[0], 136)
COLUMN = 92  # pixels from one figure to the next
NEAR = 0.8  # m; the side view shows pillars that are nearer to the flight than this

PAGE = (20, 24, 32)
RULE = (60, 66, 78)
INK = (238, 241, 245)
PALE = (150, 160, 176)
PATH = (255, 176, 32)
CASING = (40, 26, 8)
LIDAR = (64, 226, 255)
GOAL = (70, 222, 110)
CRASH = (255, 72, 72)
PILLAR, PILLAR_EDGE = (66, 50, 58), (150, 132, 138)
#: A dark layer over unseen parts of the map, and over the rest of the way in the side view.
FOG = (24, 30, 44)
UNSEEN = 0.55
AHEAD = 0.5
#: Layers of the side view from below: the soil, the surface, the air, and the air that is too high.
LAYERS: tuple[Colour, ...] = (120, 98, 74), (84, 128, 76), (200, 215, 228), (222, 160, 164)
#: Opacity of a pillar over these layers: no pillar is near, one is next to the way, or one is in the way.
PILLARS = 0.0, 0.4, 0.85
#: Colours of the ground on the map, from the lowest to the highest point of a tile.
LAND = np.array([(74, 118, 82), (128, 156, 96), (186, 178, 118), (200, 166, 122), (226, 212, 196)], np.float32)
SUN, RELIEF = np.array([-0.6, 0.6, 0.9]), 1.6  # direction of the light; slopes look steeper by this factor
STEPS = 24  # levels of height and of light; a small number keeps files small
LETTERS = {
    "goal": "G",
    "drone": "D",
    "path": "*",
    "pillar": "O",
    "seen": " ",
    "unseen": ".",
}  # letters of the map as text
OUTCOMES: dict[str, tuple[str, Colour]] = {
    "": ("on its way", INK),
    "success": ("goal reached", GOAL),
    "crashed": ("crashed", CRASH),
    "late": ("out of time", PATH),
}


@dataclass(frozen=True)
class FlightFrame:
    """The state of a drone at one time of an episode."""

    tile: int
    goal: NDArray  # [3]
    seconds: float
    position: NDArray  # [3]
    velocity: NDArray  # [3]
    yaw: NDArray  # [2] cosine and sine
    seen: NDArray  # [G, G] bool: cells of the map that have been seen, by y and x
    lidar: NDArray | None  # [channels, azimuths] distances
    reward: float  # reward of the last step
    outcome: str = ""  # a key of OUTCOMES


def _profile() -> NDArray:
    """Return the colours of the side view, [flown or ahead, PILLARS, LAYERS, 3]. Pillars stand on the ground."""
    stands = np.array([at > 1 for at in range(len(LAYERS))])
    colours = np.array([canvas.mix(np.array(LAYERS), PILLAR, share * stands) for share in PILLARS])
    return np.stack((colours, canvas.mix(colours, FOG, AHEAD)))


PROFILE = _profile()


class Camera:
    """Records one episode and draws it on request."""

    def __init__(self, cfg: DroneConfig, tiles: Sequence[TerrainTile]) -> None:
        self._cfg = cfg
        self._tiles = tiles
        self.flight: list[FlightFrame] = []
        self._scene: TileScene | None = None

    @property
    def over(self) -> bool:
        return bool(self.flight[-1].outcome)

    def begin(self, moment: FlightFrame) -> None:
        self.flight = [moment]
        self._scene = None

    def add(self, moment: FlightFrame) -> None:
        self.flight.append(moment)

    def picture(self) -> NDArray:
        start = self.flight[0]
        self._scene = self._scene or TileScene(self._cfg, self._tiles[start.tile], start.goal)
        return self._scene.draw(self.flight)

    def text(self) -> str:
        return as_text(self._cfg, self._tiles[self.flight[0].tile], self.flight)


class TileScene:
    """The parts of the picture that do not change during an episode: the ground, the pillars and the goal."""

    def __init__(self, cfg: DroneConfig, tile: TerrainTile, goal: NDArray) -> None:
        self._cfg = cfg
        self._tile = tile
        self._goal = goal
        self.scale = MAP / cfg.tile_size  # pixels per metre on the map
        self._page = _page()
        self._bright = self._draw_land()
        self._dark = canvas.mix(self._bright, FOG, UNSEEN)
        low, high = float(tile.heights.min()), float(tile.heights.max())
        self._floor, self._roof = math.floor(low) - 0.5, math.ceil(high + cfg.max_height)  # m, of the side view

    def draw(self, flight: Sequence[FlightFrame]) -> NDArray:
        """Return the picture [HEIGHT, WIDTH, 3] of an episode so far."""
        picture, side = self._page.copy(), self.side(flight)
        self._draw_map(_part(picture, MAP_AT, (MAP, MAP)), flight)
        plot = _part(picture, PLOT_AT, PLOT)
        self._draw_profile(plot, side)
        self._draw_flight(plot, side, flight)
        _draw_axes(picture, side)
        self._draw_figures(picture, flight)
        return picture

    def on_map(self, points: NDArray) -> NDArray:
        """Return the pixels [..., 2] on the map of points [..., 2 or 3], with x to the right and y upwards."""
        return np.stack((points[..., 0], self._cfg.tile_size - points[..., 1]), -1) * self.scale

    def ground(self, spots: NDArray) -> NDArray:
        """Return the heights of the ground [N] at points [N, 2]."""
        across, along = (_weights(spots[:, axis], self._cfg.resolution, len(self._tile.heights)) for axis in range(2))
        heights: NDArray = ((along @ self._tile.heights) * across).sum(1)
        return heights

    def side(self, flight: Sequence[FlightFrame]) -> SideView:
        """Return the layout of the side view: the flight so far, the straight line to the goal, and its extension to the edge."""
        here, goal = flight[-1].position[:2], self._goal[:2]
        spots = np.array([*(moment.position[:2] for moment in flight), goal], np.float64)
        way = np.concatenate(((0,), np.cumsum(np.hypot(*np.diff(spots, axis=0).T))))
        span = 5.0 * math.ceil(max(1.2 * math.dist(spots[0], goal), way[-1] + 1) / 5)
        ahead = (goal - here) / max(math.dist(goal, here), 1e-6)
        return SideView(
            np.vstack((spots, goal + ahead * (span - way[-1]))), np.append(way, span), self._floor, self._roof
        )

    def _draw_land(self) -> NDArray:
        """Draw the map [MAP, MAP, 3] as if all of it had been seen."""
        pixels = (np.arange(MAP) + 0.5) / self.scale
        weights = _weights(pixels, self._cfg.resolution, len(self._tile.heights))
        height, light = (weights[::-1] @ part @ weights.T for part in _relief(self._tile.heights, self._cfg.resolution))
        height, light = np.rint(height * STEPS) / STEPS, np.rint(light * STEPS) / STEPS
        stops = np.linspace(0, 1, len(LAND))
        colours = np.stack([np.interp(height, stops, LAND[:, part]) for part in range(3)], -1)
        land: NDArray = np.clip(colours * (0.35 + 0.9 * light[..., None]), 0, 255).astype(np.uint8)
        radii = self._tile.pillars[:, 2] * self.scale
        for middle, radius in zip(self.on_map(self._tile.pillars), radii, strict=True):
            canvas.disc(land, middle + 2.5, radius, (0, 0, 0), 0.35)
            canvas.disc(land, middle, radius, PILLAR)
            canvas.ring(land, middle, radius - 1, PILLAR_EDGE, 1.2)
        return land

    def _draw_map(self, view: NDArray, flight: Sequence[FlightFrame]) -> None:
        now = flight[-1]
        cells = np.minimum(((np.arange(MAP) + 0.5) / self.scale).astype(int), len(now.seen) - 1)
        seen = now.seen[:, cells.repeat(3)][cells[::-1]].reshape(view.shape)
        np.copyto(view, np.where(seen, self._bright, self._dark))
        goal, radius = self.on_map(self._goal), self._cfg.goal_radius * self.scale
        canvas.disc(view, goal, radius, GOAL, 0.35)
        canvas.ring(view, goal, radius, GOAL, 2)
        canvas.disc(view, goal, 3, GOAL)
        if now.lidar is not None:
            self._draw_lidar(view, now, now.lidar)
        way = self.on_map(np.array([moment.position for moment in flight]))
        canvas.path(view, way, PATH, 2.5, CASING)
        _draw_dot(view, way[0], 3, PATH)
        _draw_drone(view, way[-1], now)
        bar = np.array(((10, MAP - 10), (10 + 5 * self.scale, MAP - 10)))
        canvas.path(view, bar, INK, 2.5, CASING)
        canvas.write(view, (11, MAP - 25), "5 m", CASING)
        canvas.write(view, (10, MAP - 26), "5 m", INK)

    def _draw_lidar(self, view: NDArray, now: FlightFrame, lidar: NDArray) -> None:
        """Draw the most horizontal channel as rays and every echo as a dot."""
        elevations = self._cfg.elevations
        turns = math.atan2(now.yaw[1], now.yaw[0]) + 2 * math.pi / lidar.shape[1] * np.arange(lidar.shape[1])
        ahead = np.stack((np.cos(turns), np.sin(turns)), -1)  # [azimuths, 2]
        ends = self.on_map(now.position[:2] + (lidar * np.cos(elevations)[:, None])[..., None] * ahead)
        level = ends[np.abs(elevations).argmin()]
        canvas.lines(view, self.on_map(now.position), level, LIDAR, 1, 0.5)
        echoes = ends[lidar < self._cfg.lidar_range - 1e-3]
        canvas.lines(view, echoes, echoes, LIDAR, 2.5, 0.9)

    def _draw_profile(self, view: NDArray, side: SideView) -> None:
        """Draw the ground, the pillars near the way, and the air that is too high. The way ahead is darker."""
        width, height = PLOT
        along = (np.arange(width) + 0.5) / width * side.span
        spots = np.stack([np.interp(along, side.way, side.spots[:, axis]) for axis in range(2)], -1)
        ground, pillars = self.ground(spots), self._tile.pillars
        away = (
            np.linalg.norm(spots[:, None] - pillars[:, :2], axis=-1) - pillars[:, 2]
        )  # distances from the pillars' surfaces
        gap = away.min(1, initial=np.inf)
        pixel = (side.roof - side.floor) / height  # metres
        above = side.roof - (np.arange(height) + 0.5)[:, None] * pixel - ground  # [height, width] above ground
        limits = -1.5 * pixel, 1.5 * pixel, self._cfg.max_height
        layer = np.add.reduce([above > limit for limit in limits], dtype=np.uint8)  # index in LAYERS
        pillar = (gap < NEAR).astype(np.uint8) + (gap < 0)  # index in PILLARS
        np.copyto(view, PROFILE[(along > side.flown).astype(np.uint8), pillar, layer])

    def _draw_flight(self, view: NDArray, side: SideView, flight: Sequence[FlightFrame]) -> None:
        now = flight[-1]
        goal, drone = side.pixel(side.way[-2], self._goal[2]), side.pixel(side.flown, now.position[2])
        canvas.ring(view, goal, 6, GOAL, 2)
        canvas.disc(view, goal, 3, GOAL)
        if now.lidar is not None:  # draw the azimuth towards the goal
            x, y, _ = self._goal - now.position
            share = (math.atan2(y, x) - math.atan2(now.yaw[1], now.yaw[0])) / (2 * math.pi)
            reach = now.lidar[:, round(share * now.lidar.shape[1]) % now.lidar.shape[1]]
            out, up = reach * np.cos(self._cfg.elevations), reach * np.sin(self._cfg.elevations)
            ends = side.pixel(side.flown + out, now.position[2] + up)
            canvas.lines(view, drone, ends, LIDAR, 1, 0.5)
            echoes = ends[reach < self._cfg.lidar_range - 1e-3]
            canvas.lines(view, echoes, echoes, LIDAR, 3, 0.9)
        heights = np.array([moment.position[2] for moment in flight])
        canvas.path(view, side.pixel(side.way[: len(flight)], heights), PATH, 2.5, CASING)
        _draw_dot(view, drone, 4, CRASH if now.outcome == "crashed" else INK)

    def _draw_figures(self, picture: NDArray, flight: Sequence[FlightFrame]) -> None:
        now, left = flight[-1], PLOT_AT[0]
        text, colour = OUTCOMES[now.outcome]
        canvas.write(picture, (left, EDGE), text, colour, 3)
        figures = (
            (f"{now.seconds:.1f}", "s"),
            (f"{np.linalg.norm(now.velocity):.1f}", "m/s"),
            (f"{math.dist(now.position, self._goal):.1f}", "m"),
            (f"{_return(flight):.1f}", ""),
            (f"{100 * now.seen.mean():.0f}", "%"),
        )
        for place, (figure, unit) in enumerate(figures):
            end = canvas.write(picture, (left + place * COLUMN, 74), figure, INK, 2)
            canvas.write(picture, (end + 2, 81), unit or " ", PALE)


@dataclass(frozen=True)
class SideView:
    """The layout of the side view, in metres along the way and metres of height."""

    spots: NDArray  # [n + 2, 2] positions of the drone, the goal, and the edge of the view beyond it
    way: NDArray  # [n + 2] metres along the way to each of them
    floor: float
    roof: float

    @property
    def flown(self) -> float:
        """The length of the flight in metres."""
        return float(self.way[-3])

    @property
    def span(self) -> float:
        """The whole width in metres."""
        return float(self.way[-1])

    def pixel(self, along: NDArray | float, height: NDArray | float) -> NDArray:
        """Return the pixels [..., 2] in the plot."""
        x = np.asarray(along) / self.span * PLOT[0]
        y = (self.roof - np.asarray(height)) / (self.roof - self.floor) * PLOT[1]
        return np.stack(np.broadcast_arrays(x, y), -1)


def as_text(cfg: DroneConfig, tile: TerrainTile, flight: Sequence[FlightFrame]) -> str:
    """Return the tile from above as letters, two per metre of width and one per metre of height, with a line of figures."""
    now, size = flight[-1], cfg.tile_size
    rows, columns = len(now.seen), 2 * len(now.seen)
    y, x = np.mgrid[:rows, :columns] + 0.5
    x /= 2
    marks = np.where(now.seen.repeat(2, 1), LETTERS["seen"], LETTERS["unseen"])
    away = np.hypot(x[..., None] - tile.pillars[:, 0], y[..., None] - tile.pillars[:, 1]) - tile.pillars[:, 2]
    marks[away.min(-1, initial=math.inf) < 0.25] = LETTERS["pillar"]
    for name, spots in ("path", [one.position for one in flight]), ("goal", [now.goal]), ("drone", [now.position]):
        for spot in spots:
            column, row = (int(np.clip(at, 0, size - 1e-6) * many) for at, many in zip(spot[:2], (2, 1), strict=True))
            marks[row, column] = LETTERS[name]
    figures = f"{now.seconds:5.1f} s  {np.linalg.norm(now.velocity):.1f} m/s  goal in {math.dist(now.position, now.goal):.1f} m"
    return "\n".join(
        [*("".join(row) for row in marks[::-1]), f"{figures}  return {_return(flight):.1f}  {OUTCOMES[now.outcome][0]}"]
    )


def _return(flight: Sequence[FlightFrame]) -> float:
    return math.fsum(moment.reward for moment in flight)


def _part(picture: NDArray, corner: tuple[int, int], size: tuple[int, int]) -> NDArray:
    """Return a view of a rectangle of the picture. Drawing is cut off at its edges."""
    return picture[corner[1] : corner[1] + size[1], corner[0] : corner[0] + size[0]]


def _weights(metres: NDArray, resolution: float, points: int) -> NDArray:
    """Return [N, points] the weights of points at this distance from each other in linear interpolation."""
    where = np.clip(metres / resolution, 0, points - 1)
    weights: NDArray = np.maximum(0, 1 - np.abs(where[:, None] - np.arange(points)))
    return weights


def _relief(heights: NDArray, resolution: float) -> tuple[NDArray, NDArray]:
    """Return the relative height of ground [R, C], by y and x, between its lowest and highest point, and the light on it."""
    low, high = float(heights.min()), float(heights.max())
    by_y, by_x = np.gradient(heights * RELIEF, resolution)
    normal = np.stack((-by_x, -by_y, np.ones_like(heights)), -1)
    light = (normal @ SUN) / (np.linalg.norm(normal, axis=-1) * np.linalg.norm(SUN))
    return (heights - (low + high) / 2) / max(high - low, 2.0) + 0.5, np.clip(light, 0, 1)


def _draw_dot(view: NDArray, middle: NDArray, radius: float, colour: Colour) -> None:
    canvas.disc(view, middle, radius + 1.5, CASING)
    canvas.disc(view, middle, radius, colour)


def _draw_drone(view: NDArray, middle: NDArray, now: FlightFrame) -> None:
    """Draw four rotors. The two at the nose have the colour of the path."""
    ahead = np.array((now.yaw[0], -now.yaw[1]))
    left = np.array((ahead[1], -ahead[0]))
    arms = middle + 5.5 * np.array([ahead + left, ahead - left, -ahead - left, -ahead + left])
    colour = CRASH if now.outcome == "crashed" else INK
    for arm in arms:
        canvas.disc(view, arm, 5, CASING)
    canvas.lines(view, arms[:2], arms[2:], CASING, 5)
    canvas.lines(view, arms[:2], arms[2:], colour, 2.5)
    for place, arm in enumerate(arms):
        canvas.disc(view, arm, 3.5, PATH if place < 2 else colour)


def _page() -> NDArray:
    """Draw the parts that are the same in every picture."""
    page, left = canvas.blank(WIDTH, HEIGHT, PAGE), PLOT_AT[0]
    canvas.box(page, (left, 50), (PLOT[0], 1), RULE)
    for place, name in enumerate(("time", "speed", "goal in", "return", "seen")):
        canvas.write(page, (left + place * COLUMN, 60), name, PALE)
    canvas.write(
        page, (left, PLOT_AT[1] - 16), "height in m on the way flown, and straight on to the goal (darker)", PALE
    )
    beside, in_the_way = PROFILE[0, 1:, 2].tolist()
    unseen = canvas.mix(LAND[2], FOG, UNSEEN).tolist()
    entries = (
        ("drone", INK), ("way flown", PATH), ("goal", GOAL), ("lidar", LIDAR),
        ("pillar", in_the_way), ("pillar beside", beside), ("too high", LAYERS[3]), ("not yet seen", unseen),
    )  # fmt: skip
    for place, (name, colour) in enumerate(entries):
        column, row = left + place % 4 * 110, HEIGHT - EDGE - 34 + place // 4 * 20
        canvas.box(page, (column, row), (14, 11), PALE)
        canvas.box(page, (column + 1, row + 1), (12, 9), colour)
        canvas.write(page, (column + 20, row + 2), name, INK)
    return page


def _draw_axes(picture: NDArray, side: SideView) -> None:
    (left, top), (width, height) = PLOT_AT, PLOT
    for metres in range(0, round(side.span) + 1, 5 if side.span <= 40 else 10):
        column, text = left + round(metres / side.span * (width - 1)), f"{metres} m" if metres else "0"
        canvas.box(picture, (column, top + height), (1, 4), PALE)
        canvas.write(picture, (min(column - 3 * len(text), WIDTH - EDGE - 6 * len(text)), top + height + 7), text, PALE)
    for metres in range(math.ceil(side.floor), math.floor(side.roof) + 1, 2):
        row, text = top + round(float(side.pixel(0, metres)[1])), f"{metres}"
        canvas.box(picture, (left - 4, row), (4, 1), PALE)
        canvas.write(picture, (left - 6 - 6 * len(text), row - 3), text, PALE)
