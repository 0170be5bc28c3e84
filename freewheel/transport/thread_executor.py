"""Executors that run beside the learner: in a thread with a CUDA stream of its own, or in a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any, Literal, Self

from freewheel.core import Executor
from freewheel.errors import FreewheelError
from freewheel.transport.process_executor import ProcessExecutor

Answerer = Callable[[Any], Any]
GRACE = 30.0  # seconds that a thread may take to finish what it is doing


class ThreadExecutor:
    """Answers from a thread; what it computes on a GPU runs on a stream of its own. An answer is handed over finished."""

    def __init__(self, build: Callable[[], Answerer], what: str, device: str) -> None:
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(build, device), name=f"freewheel-{what}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._asked > 0

    def ask(self, question: Any) -> None:
        import torch

        asked = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if asked is not None:
            asked.record()  # the question is complete when the asking stream has come here
        self._asked += 1
        self._questions.put((question, asked))

    def answer(self, wait: float = 0.0) -> Any:
        try:
            answer = self._answers.get(timeout=wait) if wait > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None
        self._asked -= 1
        return answer

    def close(self) -> None:
        self._over.set()
        self._questions.put(None)
        self._thread.join(GRACE)

    def _serve(self, build: Callable[[], Answerer], device: str) -> None:
        import torch

        on_gpu = device.startswith("cuda")
        stream = torch.cuda.Stream(device) if on_gpu else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            answerer: Answerer | None = None
            while (item := self._questions.get()) is not None and not self._over.is_set():
                question, asked = item
                if stream is not None and asked is not None:
                    stream.wait_event(asked)
                try:
                    answerer = answerer or build()
                    result = answerer(question)
                except FreewheelError as error:
                    result = error
                except Exception as error:  # noqa: BLE001 - told to whoever waits for the answer
                    result = FreewheelError(
                        f"{threading.current_thread().name} failed with {error!r}; please report this"
                    )
                if stream is not None:
                    stream.synchronize()
                self._answers.put(result)


class Executors:
    """Makes clocks of one kind and ends them all when it is left. Implements core.MakeExecutor."""

    def __init__(self, kind: Literal["thread", "process"], device: str) -> None:
        self._kind, self._device = kind, device
        self._made = ExitStack()

    def __call__(self, build: Callable[[], Answerer], what: str) -> Executor:
        if self._kind == "process":
            return self._made.enter_context(ProcessExecutor[Any, Any](build, what, nice=0))
        clock = ThreadExecutor(build, what, self._device)
        self._made.callback(clock.close)
        return clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._made.close()
