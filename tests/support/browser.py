"""A real browser without a screen: Chromium, driven by selenium."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: Few processes, no network of its own, nothing of the user's.
SWITCHES = (
    "--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio",
    "--renderer-process-limit=1", "--disable-features=SpareRendererForSitePerProcess,Translate,MediaRouter",
)  # fmt: skip


@contextmanager
def browser(folder: Path, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """A window of this size; a test without a browser is skipped, but not in CI."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = (
            "chromium and chromedriver are missing: `make browser` as root, or apt-get install chromium chromium-driver"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (*SWITCHES, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.getuid() == 0 else [])):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.set_page_load_timeout(20)
        window.set_script_timeout(20)
        resize(window, width, height)
        yield window
    finally:
        window.quit()


def resize(window: Any, width: int, height: int, *, dark: bool = False) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def eventually(look: Callable[[], T], limit: float = 30.0, what: str = "") -> T:
    """What a look finds as soon as it is true."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        assert time.monotonic() < deadline, what or f"it has not become true within {limit:g} s"
        time.sleep(0.02)
    return found


def complaints(window: Any) -> list[str]:
    """What the browser has complained of since this was last asked."""
    return [entry["message"] for entry in window.get_log("browser") if entry["level"] != "INFO"]
