"""The simulator's package that is loaded, and the errors if none can be loaded."""

from __future__ import annotations

import pytest

from freewheel_cage2 import cyborg_package


@pytest.mark.parametrize("namesake", [False, True])
def test_without_a_simulator_the_error_names_what_to_install(namesake: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cyborg_package, "find_spec", lambda name: True if namesake and name == "cyborg" else None)
    with pytest.raises(ModuleNotFoundError, match=r"^the simulator CybORG is not installed: pip install") as caught:
        cyborg_package.find()
    assert str(caught.value).endswith(cyborg_package.NAMESAKE) == namesake


def test_a_simulator_with_parts_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> cyborg_package.CyborgPackage:
        raise ModuleNotFoundError("No module named 'paramiko'")

    monkeypatch.setattr(cyborg_package, "_fork", broken)
    with pytest.raises(ImportError, match=r"^the simulator 'csle_cyborg' cannot be loaded \(No module named 'para"):
        cyborg_package.find()
