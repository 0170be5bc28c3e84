"""The files that Isaac Lab's Cartpole tasks fetch from its asset server, for machines that cannot reach it.

The robot is the server's own: Newton's wheel has a copy of it. The ground is a plane without a texture.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = "ISAACSIM_ASSET_ROOT"  # the environment variable by which Isaac Lab is told where its files are
COPY = "examples/assets/cartpole_single_pendulum.usda"  # in Newton's package
ROBOT = "Isaac/IsaacLab/Robots/Classic/Cartpole/cartpole.usd"
GROUND = "Isaac/IsaacLab/Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda"
PLANE = """#usda 1.0
(
    defaultPrim = "Ground"
    metersPerUnit = 1
    upAxis = "Z"
)

def Xform "Ground"
{
    def Plane "CollisionPlane" (
        prepend apiSchemas = ["PhysicsCollisionAPI"]
    )
    {
        uniform token axis = "Z"
    }
}
"""


def write_assets(folder: Path) -> Path:
    """Write them below this folder, which ISAACSIM_ASSET_ROOT has to name before Isaac Lab is imported."""
    newton = importlib.util.find_spec("newton")
    assert newton is not None, "Isaac Lab comes with Newton"
    robot = (Path(newton.origin or "").parent / COPY).read_text()
    # its default prim is spelled in another way than the prim itself
    for path, text in ((ROBOT, robot.replace('defaultPrim = "cartPole"', 'defaultPrim = "cartpole"')), (GROUND, PLANE)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
