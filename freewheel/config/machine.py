"""The hardware of a run: the options of the machine, and which of the devices in --device it has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from freewheel.config.flags import shortened
from freewheel.core import Compile
from freewheel.errors import Range, SetupError, UsageError, check_ranges

AUTO, CPU, GPU = "auto", "cpu", "cuda"


@dataclass(frozen=True)
class Placement:
    """The devices of one learner and of its batched simulator: cpu or cuda:N."""

    learner: str
    simulator: str  # the learner's device unless the user named another; meaningless without a batched simulator


@dataclass(frozen=True)
class Devices:
    """The devices in --device, in order: one per learner; or, with one learner, its device and the simulator's."""

    names: tuple[str, ...]  # auto, cpu or cuda alone, or several of cpu and cuda:N

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse --device; raise UsageError if a name is not a device, or if no run can use this list."""
        names = tuple(name.strip() for name in text.split(","))
        if wrong := [name for name in names if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name)]:
            given = shortened(wrong[0])
            raise UsageError(f"--device must be auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1, not {given}")
        if len(names) == 1:
            return cls(names)
        if AUTO in names:
            raise UsageError(f"--device {text}: auto stands alone; name every device, e.g. cuda:0,cuda:1")
        names = tuple("cuda:0" if name == GPU else name for name in names)
        for name in names:
            if name != CPU and names.count(name) > 1:
                raise UsageError(f"--device {text} names {name} twice; name every GPU once")
        return cls(names)

    @property
    def text(self) -> str:
        return ",".join(self.names)

    def place(self, gpus: int, *, rank: int = 0, learners: int = 1, simulated: bool = False) -> Placement:
        """Place learner `rank` of `learners` on a machine with `gpus` GPUs. simulated: one simulation of all lanes takes
        part; it may have a separate device. Raises UsageError if there are more or fewer devices than the run can use,
        SetupError if a GPU is missing here."""
        self._check_use(learners, simulated)
        missing = [name for name in self.names if name not in (AUTO, CPU) and int(name.partition(":")[2] or 0) >= gpus]
        if missing:
            raise SetupError(
                f"--device {self.text}: torch sees {described(gpus)} here; use --device {'cuda' if gpus else 'cpu'}"
            )
        if len(self.names) > 1:
            own = self.names[rank] if learners > 1 else self.names[0]
            return Placement(own, own if learners > 1 else self.names[1])
        (name,) = self.names
        if name == GPU and learners > gpus:
            remedy = f"say --learners {gpus}, --device cuda:0 for all of them, or --device cpu"
            raise SetupError(
                f"--device cuda: each of {learners} learners needs a GPU, torch sees {described(gpus)}; {remedy}"
            )
        if name in (AUTO, GPU):
            name = f"cuda:{rank}" if gpus >= learners else CPU
        return Placement(name, name)

    def _check_use(self, learners: int, simulated: bool) -> None:
        """Raise UsageError if these devices do not fit the number of learners or the use of a simulator."""
        count, what = len(self.names), f"--device {self.text}"
        if learners > 1:
            enough = ",".join(f"cuda:{number}" for number in range(learners))
            if count > 1 and count != learners:
                raise UsageError(
                    f"{what} names {count} devices for {learners} learners; name one for each, e.g. {enough}"
                )
            if count > 1 and len({name == CPU for name in self.names}) > 1:
                raise UsageError(f"{what}: learners that train together are all on the CPU or all on GPUs, not on both")
        elif count > 2 or (count > 1 and not simulated):
            use = "the learner and the simulator" if simulated else "the learner: environments run on the CPU"
            fewer = ",".join(self.names[: 1 + simulated])
            raise UsageError(
                f"{what} names {count} devices and there is use for {1 + simulated}, {use}; "
                f"say --device {fewer}, or --learners {count} for as many learners"
            )
        elif count > 1 and self.names[0] == self.names[1]:
            raise UsageError(f"{what} names {self.names[0]} twice; name it once: learner and simulator share it")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The hardware that the learner uses."""

    device: str = "cpu"
    """The learner's device: cpu, cuda, or cuda:1 for the second GPU; auto: a GPU if there is one. A batched simulator
    uses the same device, or a second one: cuda:0,cuda:1. With several learners: one device for each, in order."""
    learners: Annotated[int, Range(least=1, most=1024)] = 1
    """Learners that train together, each in its own process with its share of the environments, steps and rows;
    gradients are averaged. All other options describe the whole run. torchrun sets this option."""
    threads: Annotated[int, Range(least=1, most=1024)] = 1
    """CPU threads of the learner, or of all learners together; small networks are fastest with one per learner."""
    compile: Compile = "graphs"
    """graphs: on a GPU, record operations of fixed shape as CUDA graphs and replay them; off: launch every operation."""
    substitute: bool = False
    """If this machine has no GPU or no Isaac Lab, use the CPU or a similar environment instead, and report it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        Devices.parse(self.device)

    @property
    def devices(self) -> Devices:
        return Devices.parse(self.device)


def listed(devices: Sequence[object]) -> str:
    """Return a list of devices from Python or a file in the form of --device."""
    return ",".join(map(str, devices))


def described(gpus: int) -> str:
    """Describe the GPUs of this machine, for the user."""
    names = [f"cuda:{number}" for number in range(gpus)]
    return (
        "no GPU" if not names else f"only {names[0]}" if gpus == 1 else f"only {', '.join(names[:-1])} and {names[-1]}"
    )


def find_devices(wanted: str, *, rank: int = 0, learners: int = 1, simulated: bool = False) -> Placement:
    """Apply Devices.place to this machine, and make the learner's GPU the current device of this thread. Torch is
    imported only if a GPU may be used."""
    devices, gpus = Devices.parse(wanted), 0
    if set(devices.names) != {CPU}:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    placed = devices.place(gpus, rank=rank, learners=learners, simulated=simulated)
    if placed.learner != CPU:
        torch.cuda.set_device(placed.learner)
    return placed


def find_device_again(wanted: str) -> str:
    """Return the device to play the simulator of a run that was trained with this --device: the device that it had, any
    GPU if this machine lacks that one, else the CPU."""
    try:
        return find_devices(Devices.parse(wanted).names[-1]).simulator
    except SetupError:
        return find_devices(AUTO).simulator
