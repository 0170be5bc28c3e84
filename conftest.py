"""What every test gets: one BLAS thread, no screen, a state directory of its own, and the plugins of this suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.warm import Server, shared_server

# Read by libraries when they are imported, so set before any test imports them; child processes inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    FREEWHEEL_CACHE="",  # nothing is remembered from one test to the next, or from the user's runs
    PYGAME_HIDE_SUPPORT_PROMPT="1",
    SDL_AUDIODRIVER="dummy",
    SDL_VIDEODRIVER="dummy",
)

pytest_plugins = [f"tests.plugins.{name}" for name in ("tiers", "durations", "leaks", "repeat", "scheduling")]

#: Minutes of several machines' worth of processes: `make test-cluster`.
collect_ignore = [] if os.environ.get("FREEWHEEL_CLUSTER") else ["packages/ray/tests/cluster"]

settings.register_profile("freewheel", deadline=None, derandomize=True)
settings.load_profile("freewheel")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that signs run directories is one of the tests, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def server() -> Server:
    """Starts commands without the seconds that their imports take."""
    return shared_server()
