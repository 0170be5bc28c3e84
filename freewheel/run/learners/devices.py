"""Places the learner and the simulator of a plan on devices, by --device and the devices of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freewheel.config.machine import find_devices
from freewheel.core import EnvSpec
from freewheel.errors import SetupError
from freewheel.transport.learners.rank import of_torchrun

if TYPE_CHECKING:
    from freewheel.config.resolve import Config


def placed(config: Config) -> tuple[Config, str]:
    """Return the config with its simulator, if any, on its device, and the first learner's device (cpu or cuda:N)."""
    place, machine = of_torchrun(), config.run.machine
    learners = machine.learners if place is None else place.local
    where = find_devices(machine.device, learners=learners, simulated=config.env.on_device)
    return replace(config, env=config.env.to(where.simulator)), where.learner


def placed_or_substituted(config: Config) -> tuple[Config, str]:
    """Do the same as `placed`, but use the CPU if a GPU is missing and the user allows it."""
    try:
        return placed(config)
    except SetupError as error:
        if not config.run.machine.substitute:
            raise
        note = f"{str(error).partition(';')[0]}: this run uses the CPU"
        return replace(config, env=config.env.to("cpu"), notes=(*config.notes, note)), "cpu"


def task_beside(spec: EnvSpec, device: str) -> Any:
    """Return the model task that the simulator declares, with its tensors on the learner's device."""
    if spec.model_task is None or spec.device == device:
        return spec.model_task
    from freewheel.learn.mbpo.task import task_on

    return task_on(device, spec.model_task)
