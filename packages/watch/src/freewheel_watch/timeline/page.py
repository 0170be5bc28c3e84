"""This module turns a timeline into a page. Other pages embed gantt.js and gantt.css, and `page`
returns a page that needs nothing else."""

from __future__ import annotations

import html
import json
from pathlib import Path

from freewheel.timeline.model import Timeline

HERE = Path(__file__).parent


def script() -> str:
    """Return JavaScript that defines freewheelGantt(element, json)."""
    return (HERE / "gantt.js").read_text(encoding="utf-8")


def style() -> str:
    return (HERE / "gantt.css").read_text(encoding="utf-8")


def embedded(timeline: Timeline) -> str:
    """Return the JSON of a timeline in a form that is safe inside a <script> element."""
    return json.dumps(timeline.to_json(), separators=(",", ":")).replace("<", "\\u003c")


def page(timeline: Timeline, title: str) -> str:
    """Return a page in one file. It fetches nothing."""
    name = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: timeline</title>
<style>
body {{ margin: 24px; font: 14px/1.5 system-ui, sans-serif; color-scheme: light dark; }}
h1 {{ font-size: 18px; margin: 0 0 2px; }}
p {{ margin: 0 0 14px; opacity: 0.75; max-width: 80ch; }}
{style()}</style>
</head>
<body>
<h1>{name}</h1>
<p>The timeline shows what every part of the run did over {timeline.seconds:.3g} seconds. Thin bars in warm colours are
waits. Point at a wait to see what it is for and why. Point at a kind above the rows to see only that kind.</p>
<div id="timeline"></div>
<script>
{script()}
freewheelGantt(document.getElementById("timeline"), {embedded(timeline)});
</script>
</body>
</html>
"""
