"""GPUs for a machine without any: tensors on the CPU that say they are on a GPU, with streams and events that only keep account.

Work is done at once, in the order of the program. What is kept is what a real GPU promises: which work of other streams a stream
(or the host) has waited for. Whatever would be luck on a real machine is a hazard here, every time: tensors of two devices in one
operation, a read of what another stream may still be writing, memory that is given back while another stream may still use it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HOST = "host"
#: What a program learns from a tensor waits for the device.
LOOKS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "equal", "nonzero"}
CPU = torch.device("cpu")


class HazardError(AssertionError):
    """What would be a race, or an error, on real devices."""


class Clock(dict[Any, int]):
    """How much of every stream's work is known to be done."""

    def learn(self, other: Mapping[Any, int]) -> None:
        for stream, ticks in list(other.items()):  # other threads may add to it
            self[stream] = max(ticks, self.get(stream, 0))


class PretendStream:
    numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = MACHINE.device_of(device)
        self.clock, self.number = Clock(), next(self.numbers)
        Machine.streams_made.append(self)

    def wait_event(self, event: PretendEvent) -> None:
        self.clock.learn(event.clock)

    def wait_stream(self, other: PretendStream) -> None:
        self.clock.learn(other.clock)

    def synchronize(self) -> None:
        MACHINE.host.learn(self.clock)

    def launch(self) -> int:
        """One more piece of work, which comes after all that the host has waited for."""
        self.clock.learn(MACHINE.host)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def __repr__(self) -> str:
        return f"stream {self.number} of {self.device}"


class PretendEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: Clock = Clock()
        self.device: torch.device | None = None

    def record(self, stream: PretendStream | None = None) -> None:
        stream = stream or MACHINE.current_stream()
        self.clock, self.device = Clock(stream.clock), stream.device

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        MACHINE.host.learn(self.clock)

    def elapsed_time(self, other: PretendEvent) -> float:
        if self.device != other.device:
            raise HazardError(f"time between events of {self.device} and {other.device}")
        return 1.0


class Machine(threading.local):
    """What belongs to a thread: its current device, the current stream of each device, and what it has waited for."""

    defaults: dict[torch.device, PretendStream]  # of all threads
    streams_made: list[PretendStream]
    hosts: list[Clock]  # of all threads
    hazards: list[str]  # those that nobody could be told of
    started: Clock  # what the main thread had waited for when the last thread began

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        self.streams: dict[torch.device, PretendStream] = {}
        self.host = Clock(getattr(Machine, "started", {}))
        Machine.hosts.append(self.host)

    def device_of(self, device: Any) -> torch.device:
        if device is None:
            return self.device
        found = torch.device(device)
        return self.device if found == torch.device("cuda") else found

    def current_stream(self, device: Any = None) -> PretendStream:
        where = self.device_of(device)
        if where not in Machine.defaults:
            Machine.defaults[where] = PretendStream(where)
        return self.streams.get(where, Machine.defaults[where])

    def synchronize(self, device: Any = None) -> None:
        where = self.device_of(device)
        for stream in list(Machine.streams_made):
            if stream.device == where:
                self.host.learn(stream.clock)
        Machine.started = Clock(self.host)

    @contextmanager
    def on(self, stream: PretendStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.device, dict(self.streams)
        self.device, self.streams[stream.device] = stream.device, stream
        try:
            yield
        finally:
            self.device, self.streams = before

    @contextmanager
    def using(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, self.device_of(device)
        try:
            yield
        finally:
            self.device = before


Machine.hosts = []
MACHINE = Machine()


@dataclass
class Memory:
    """What several views share. Given back when the last of them is gone, in whichever thread: then only its own stream may still
    have work on it."""

    owner: PretendStream | None  # who allocated it; None: the host
    written: tuple[PretendStream, int] | None = None
    uses: dict[PretendStream, int] = field(default_factory=dict)
    recorded: set[PretendStream] = field(default_factory=set)

    def read(self, known: Clock, who: Any) -> None:
        if self.written is not None and known.get(self.written[0], 0) < self.written[1]:
            raise HazardError(f"{who} reads what {self.written[0]} may not have written yet")

    def write(self, known: Clock, who: PretendStream | None, tick: int) -> None:
        for stream, used in list(self.uses.items()):
            if stream is not who and known.get(stream, 0) < used:
                raise HazardError(f"{who or HOST} overwrites what {stream} may still be reading")
        self.written = None if who is None else (who, tick)

    def __del__(self) -> None:
        known = Clock()
        for host in list(Machine.hosts):
            known.learn(host)
        if self.owner is not None:
            known.learn(self.owner.clock)
        for stream, tick in self.uses.items():
            if stream is not self.owner and stream not in self.recorded and known.get(stream, 0) < tick:
                Machine.hazards.append(f"memory of {self.owner or HOST} is given back while {stream} may use it")


class Pretend(Tensor):
    """A tensor that says it is on a GPU, or on the CPU in memory that a GPU may be writing."""

    place: torch.device
    memory: Memory

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    def record_stream(self, stream: Any) -> None:
        if stream.device != self.place:
            raise HazardError(f"memory of {self.place} is recorded on {stream}")
        self.memory.recorded.add(stream)

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def to(self, device: Any, dtype: Any = None, *, non_blocking: bool = False, copy: bool = False) -> Tensor:  # type: ignore[override]
        if dtype is not None:
            here = self.to(device)
            return here if here.dtype == dtype else here.type(dtype)
        if torch.device(device) == self.place and not copy:
            return self
        made = _made(plain(self).clone(), torch.device(device))
        _transfer(self, made, non_blocking=non_blocking)
        return made if made.is_cuda or non_blocking else plain(made)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        plain(self).copy_(plain(source))
        if isinstance(source, Pretend) and source.place == self.place:
            _kept("copy_", [self, source], self, {}, looks=False)
            return self
        _transfer(source, self, non_blocking=non_blocking)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        name = getattr(func, "__name__", "")
        looks = name in LOOKS
        if not looks and name != "__setitem__" and not list(_tensors(result)):
            return result  # a shape, a type
        return _kept(name, tensors, result, kwargs, looks=looks)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _kept(name: str, tensors: list[Tensor], result: Any, kwargs: Any, *, looks: bool) -> Any:
    """Account for an operation, and mark what it returns."""
    marked = [one for one in tensors if isinstance(one, Pretend)]
    places = {one.place for one in marked} | {CPU for one in tensors if not isinstance(one, Pretend) and one.dim()}
    if len(places) > 1:
        raise HazardError(f"{name} of tensors on {' and '.join(sorted(map(str, places)))}")
    (place,) = places
    stream, known = _launched(place)
    tick = 0 if stream is None else known[stream]
    for one in marked:
        one.memory.read(known, stream or HOST)
        if stream is not None:
            one.memory.uses[stream] = tick
    changed = [kwargs["out"]] if "out" in kwargs else marked[:1] if _in_place(name) else []
    for one in changed:
        one.memory.write(known, stream, tick)
    if looks and stream is not None:
        stream.synchronize()
    owned = {_address(one): one.memory for one in marked if one.numel()}

    def mark(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(mark, value))
        if not isinstance(value, Tensor) or isinstance(value, Pretend):
            return value
        return _made(
            value, place, owned.get(_address(value)) or Memory(stream, None if stream is None else (stream, tick))
        )

    return mark(result)


def _address(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _in_place(name: str) -> bool:
    return name in ("__setitem__", "__iadd__", "__imul__") or (name.endswith("_") and not name.endswith("__"))


def _launched(place: torch.device) -> tuple[PretendStream | None, Clock]:
    """The stream that works there now, and what is done when it begins; None: the host works."""
    if place.type == "cpu":
        return None, MACHINE.host
    stream = MACHINE.current_stream(place)
    stream.launch()
    return stream, stream.clock


def _transfer(source: Tensor, target: Pretend, *, non_blocking: bool) -> None:
    """As torch copies: on the current stream of the source, or of the target where the source is the host's; the current
    streams of two GPUs wait for each other before and after."""
    origin = source.place if isinstance(source, Pretend) else CPU
    worker, known = _launched(origin if origin.type == "cuda" else target.place)
    other = MACHINE.current_stream(target.place) if target.is_cuda else None
    if worker is not None and other is not None:
        worker.clock.learn(other.clock)
        known = worker.clock
    tick = 0 if worker is None else known[worker]
    if isinstance(source, Pretend):
        source.memory.read(MACHINE.host if origin == CPU else known, worker or HOST)
        if worker is not None and origin != CPU:
            source.memory.uses[worker] = tick
    target.memory.owner = target.memory.owner or other
    target.memory.write(known, worker, tick)
    if worker is not None and target.is_cuda:
        target.memory.uses[worker] = tick
    if worker is not None and other is not None:
        other.clock.learn(worker.clock)
    if worker is not None and not non_blocking and origin.type == "cuda" and not target.is_cuda:
        worker.synchronize()


def told() -> None:
    """Other threads have told this one what they have waited for."""
    for host in list(Machine.hosts):
        MACHINE.host.learn(host)


def _made(values: Tensor, place: torch.device, memory: Memory | None = None) -> Pretend:
    made = values.as_subclass(Pretend)
    made.place, made.memory = place, memory or Memory(None)
    return made


def plain(tensor: Tensor) -> Tensor:
    """The numbers, without any account."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def pretend(values: Tensor, device: Any) -> Pretend:
    """Written there by the current stream."""
    made = _made(values, MACHINE.device_of(device) if "cuda" in str(device) else CPU)
    stream, known = _launched(made.place)
    made.memory.owner, made.memory.written = stream, None if stream is None else (stream, known[stream])
    return made


class Making(TorchFunctionMode):
    """What is made with a device is pretended to be there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        made = func(*args, **kwargs)
        if device is None or isinstance(made, Pretend) or not isinstance(made, Tensor):
            return made
        return pretend(made, device)


@contextmanager
def pretend_gpus(patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Two GPUs. What is given raises the first hazard that could not be raised where it happened."""
    Machine.defaults, Machine.streams_made, Machine.hazards, Machine.started = {}, [], [], Clock()
    Machine.hosts = []
    MACHINE.__init__()  # type: ignore[misc]
    for name, value in (
        ("Stream", PretendStream), ("Event", PretendEvent), ("stream", MACHINE.on), ("device", MACHINE.using),
        ("current_stream", MACHINE.current_stream), ("synchronize", MACHINE.synchronize),
        ("current_device", lambda: MACHINE.device.index),
        ("is_available", lambda: True), ("device_count", lambda: 2),
    ):  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    patch.setattr("freewheel.rollout.graphs._READY", {torch.device(f"cuda:{number}") for number in range(2)})

    def check() -> None:
        if Machine.hazards:
            raise HazardError(Machine.hazards[0])

    with Making():
        yield check
