"""--device: one name or a list, and what it means for one learner, for several, and for a simulator beside the learner."""

from __future__ import annotations

import pytest

from freewheel.config.machine import Devices, MachineOptions, Placement, find_device_again, find_devices
from freewheel.config.resolve import from_argv, from_options
from freewheel.errors import SetupError, UsageError
from freewheel.run.learners.devices import placed

DRONE = "freewheel/RoughDrone-v0"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with two GPUs, as torch would describe it; returns what becomes the current device."""
    chosen: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("text", "simulated", "placement"),
    [
        ("cpu", False, ("cpu", "cpu")), ("auto", True, ("cuda:0", "cuda:0")),
        ("cuda", True, ("cuda:0", "cuda:0")), ("cuda:1", True, ("cuda:1", "cuda:1")),
        ("cuda:1", False, ("cuda:1", "cuda:1")), ("cuda:0,cuda:1", True, ("cuda:0", "cuda:1")),
        ("cuda:1, cuda:0", True, ("cuda:1", "cuda:0")), ("cuda,cuda:1", True, ("cuda:0", "cuda:1")),
        ("cuda,cpu", True, ("cuda:0", "cpu")), ("cpu,cuda:1", True, ("cpu", "cuda:1")),
    ],
)  # fmt: skip
def test_the_learner_is_first_and_the_simulator_second(text: str, simulated: bool, placement: tuple[str, str]) -> None:
    assert Devices.parse(text).place(2, simulated=simulated) == Placement(*placement)


@pytest.mark.parametrize(
    ("text", "gpus", "devices"),
    [
        ("cpu", 2, ["cpu", "cpu"]), ("cpu,cpu", 0, ["cpu", "cpu"]), ("cuda", 4, ["cuda:0", "cuda:1"]),
        ("auto", 2, ["cuda:0", "cuda:1"]), ("auto", 1, ["cpu", "cpu"]),
        ("cuda:3,cuda:1", 4, ["cuda:3", "cuda:1"]), ("cuda:1", 2, ["cuda:1", "cuda:1"]),
    ],
)  # fmt: skip
def test_every_learner_has_a_device_and_its_simulator_with_it(text: str, gpus: int, devices: list[str]) -> None:
    for rank, device in enumerate(devices):
        assert Devices.parse(text).place(gpus, rank=rank, learners=2, simulated=True) == Placement(device, device)


def refusal(text: str, gpus: int, learners: int, *, simulated: bool) -> str:
    with pytest.raises((UsageError, SetupError)) as refused:
        Devices.parse(text).place(gpus, learners=learners, simulated=simulated)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "gpus", "learners", "simulated", "why"),
    [
        ("gpu", 2, 1, True, "must be auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1, not gpu"),
        ("cuda:0,", 2, 1, True, "must be auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1, not "),
        ("cuda:-1", 2, 1, True, "must be auto, cpu"),
        ("cuda:0;cuda:1", 2, 1, True, "must be auto, cpu"),
        ("auto,cpu", 2, 1, True, "auto stands alone"),
        ("cuda:1,cuda:1", 2, 1, True, "names cuda:1 twice; name every GPU once"),
        ("cuda,cuda:0", 2, 2, True, "names cuda:0 twice"),
        ("cpu,cpu", 2, 1, True, "names cpu twice; name it once: learner and simulator share it"),
        ("cuda:0,cuda:1", 2, 1, False, "names 2 devices and there is use for 1, the learner: environments run on the CPU"),
        ("cuda:0,cuda:1", 2, 1, False, "say --device cuda:0, or --learners 2 for as many learners"),
        ("cpu,cuda:0,cuda:1", 2, 1, True, "names 3 devices and there is use for 2, the learner and the simulator"),
        ("cuda:0,cuda:1", 2, 3, True, "names 2 devices for 3 learners; name one for each, e.g. cuda:0,cuda:1,cuda:2"),
        ("cpu,cuda:0", 2, 2, True, "all on the CPU or all on GPUs, not on both"),
        ("cuda:2", 2, 1, True, "--device cuda:2: torch sees only cuda:0 and cuda:1 here; use --device cuda"),
        ("cuda:0,cuda:1", 1, 1, True, "--device cuda:0,cuda:1: torch sees only cuda:0 here; use --device cuda"),
        ("cpu,cuda", 0, 1, True, "torch sees no GPU here; use --device cpu"),
        ("cuda", 2, 4, True, "each of 4 learners needs a GPU, torch sees only cuda:0 and cuda:1; say --learners 2"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(
    text: str, gpus: int, learners: int, simulated: bool, why: str
) -> None:
    assert why in refusal(text, gpus, learners, simulated=simulated)


def test_the_list_comes_from_a_command_line_or_from_python(gpus: list[str]) -> None:
    typed = from_argv([DRONE, "--device", "cuda:0,cuda:1"])
    given = from_options(DRONE, {"device": ["cuda:0", "cuda:1"]})
    assert typed.run.machine == given.run.machine == MachineOptions(device="cuda:0,cuda:1")
    config, learner = placed(given)
    assert (learner, config.env.device, gpus) == ("cuda:0", "cuda:1", ["cuda:0"])  # type: ignore[attr-defined]


def test_a_list_for_environments_on_the_cpu_is_refused_before_anything_starts(gpus: list[str]) -> None:
    with pytest.raises(UsageError, match="there is use for 1, the learner"):
        placed(from_argv(["CartPole-v1", "--device", "cuda:0,cuda:1"]))
    assert gpus == []


def test_a_gpu_is_current_before_anything_is_made_there(gpus: list[str]) -> None:
    assert find_devices("cuda:1").learner == "cuda:1"
    assert gpus == ["cuda:1"]


@pytest.mark.parametrize(
    ("trained", "played"),
    [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda:0,cuda:1", "cuda:1"), ("cuda:0,cpu", "cpu"), ("cuda:7", "cuda:0")],
)
def test_a_run_is_played_where_its_simulator_was_or_where_a_gpu_is(gpus: list[str], trained: str, played: str) -> None:
    assert find_device_again(trained) == played


def test_a_run_of_a_gpu_is_played_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert find_device_again("cuda:0,cuda:1") == "cpu"
