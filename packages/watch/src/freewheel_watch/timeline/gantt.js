"use strict";
/* freewheelGantt(element, json) draws a zoomable timeline. The json comes from freewheel.timeline (Timeline.to_json).
   Ctrl and the wheel zoom (or a pinch on a touchpad), dragging pans, and a double click shows all. The arrow keys, +, - and 0 do
   the same. The wheel alone scrolls through the rows.
   It returns {update(json), destroy()}. An update keeps the zoom. */
function freewheelGantt(element, json) {
  const AXIS = 22, TITLE = 18, MARGIN = 118, PAD = 6, MANY = 24; // rows are thin if there are more
  const TITLES = { envs: "Envs", learner: "Learner", gpu: "GPU", sync: "Sync" };
  const ORDER = ["learner", "gpu", "sync", "envs"];
  let ROW = 20, GAP = 4, data, lines, whole, view, height, following = true, spotlight = -1, hovered = null, asked = 0, dragging = null;

  element.classList.add("fw-gantt");
  element.replaceChildren();
  const make = (tag, name, parent) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    parent.append(made);
    return made;
  };
  const head = make("div", "fw-head", element);
  const scroll = make("div", "fw-scroll", element);
  const canvas = make("canvas", "", scroll);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const tip = make("div", "fw-tip", element);
  tip.hidden = true;
  const pen = canvas.getContext("2d");

  function take(next) {
    data = next;
    const begin = data.begin || 0;
    whole = [begin, begin + Math.max(data.seconds, 1e-6)];
    if (following || !view) view = whole.slice();
    lines = [];
    [ROW, GAP] = data.rows.length > MANY ? [13, 2] : [20, 4];
    let y = AXIS;
    for (const group of ORDER) {
      const rows = data.rows.map((row, number) => ({ row, number })).filter((one) => one.row.group === group);
      if (!rows.length) continue;
      lines.push({ title: TITLES[group], y });
      y += TITLE;
      for (const { row, number } of rows) {
        lines.push({ row, number, y });
        y += ROW + GAP;
      }
    }
    height = y + PAD;
    canvas.setAttribute("aria-label", "Timeline of " + data.rows.length + " rows over " + seconds(data.seconds));
    legend();
    resize();
  }

  function legend() {
    head.replaceChildren();
    data.kinds.forEach((kind, number) => {
      const entry = make("span", "fw-kind", head);
      make("span", "fw-swatch", entry).style.background = data.colors[number];
      entry.append(kind);
      entry.title = data.about[number] || kind;
      entry.onmouseenter = () => { spotlight = number; draw(); };
      entry.onmouseleave = () => { spotlight = -1; draw(); };
    });
    const hint = make("span", "fw-hint", head);
    hint.append("Ctrl + wheel: zoom · drag: move · ");
    const button = make("button", "", hint);
    button.type = "button";
    button.textContent = "show all";
    button.onclick = reset;
  }

  function resize() {
    const ratio = window.devicePixelRatio || 1, width = Math.max(element.clientWidth, 320);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
  }

  function draw() {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; paint(); });
  }

  const width = () => canvas.clientWidth || element.clientWidth || 320;
  const room = () => Math.max(width() - MARGIN - PAD, 50);
  const toX = (time) => MARGIN + (room() * (time - view[0])) / (view[1] - view[0]);
  const toTime = (x) => view[0] + ((x - MARGIN) / room()) * (view[1] - view[0]);

  function paint() {
    const style = getComputedStyle(element), of = (name) => style.getPropertyValue(name).trim();
    const ink = of("--fw-ink"), faint = of("--fw-faint"), line = of("--fw-line"), band = of("--fw-band");
    pen.clearRect(0, 0, width(), height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    ticks(line, faint);
    for (const one of lines) {
      pen.textAlign = "left";
      if (one.title) {
        pen.fillStyle = faint;
        pen.font = "600 11px system-ui, sans-serif";
        pen.fillText(one.title, 2, one.y + TITLE / 2 + 2);
        pen.font = "12px system-ui, sans-serif";
        continue;
      }
      pen.fillStyle = ink;
      pen.fillText(shorten(one.row.name), 10, one.y + ROW / 2);
      pen.fillStyle = band;
      pen.fillRect(MARGIN, one.y, room(), ROW);
      spans(one);
    }
    if (hovered) outline(ink);
  }

  function shorten(name) {
    let text = name;
    while (text.length > 3 && pen.measureText(text).width > MARGIN - 18) text = text.slice(0, -2);
    return text === name ? name : text + "…";
  }

  function ticks(line, faint) {
    const rough = (view[1] - view[0]) / Math.max(room() / 90, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    pen.textAlign = "center";
    for (let n = Math.ceil(view[0] / step); n * step <= view[1]; n++) {
      const x = toX(n * step);
      pen.fillStyle = line;
      pen.fillRect(Math.round(x), AXIS - 4, 1, height - AXIS);
      pen.fillStyle = faint;
      const text = (n * step).toFixed(digits) + " s", half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(x, width() - half - 1), AXIS / 2 - 2);
    }
  }

  /* Draws the spans of a row. Where spans are narrower than a pixel, the pixel shows the kind that covers most of it. */
  function spans(one) {
    const list = one.row.spans, right = width() - PAD;
    let mixed = null, pixel = -1;
    const flush = () => {
      if (!mixed) return;
      const kind = [...mixed.entries()].reduce((most, next) => (next[1] > most[1] ? next : most))[0];
      fill(kind, pixel, 1, one.y);
      mixed = null;
    };
    for (let n = from(list, view[0]); n < list.length && list[n][0] <= view[1]; n++) {
      const [t0, t1, kind] = list[n];
      const x0 = Math.max(toX(t0), MARGIN), x1 = Math.min(toX(t1), right);
      if (x1 - x0 >= 1) {
        flush();
        fill(kind, x0, x1 - x0, one.y);
      } else {
        if (Math.floor(x0) !== pixel) flush();
        pixel = Math.floor(x0);
        mixed = mixed || new Map();
        mixed.set(kind, (mixed.get(kind) || 0) + (t1 - t0));
      }
    }
    flush();
  }

  function fill(kind, x, length, y) {
    pen.globalAlpha = spotlight < 0 || spotlight === kind ? 1 : 0.15;
    pen.fillStyle = data.colors[kind];
    const waits = data.waits_for[kind] !== "";
    pen.fillRect(x, waits ? y + ROW / 4 : y, length, waits ? ROW / 2 : ROW);
    if (!waits && length > pen.measureText(data.kinds[kind]).width + 10) {
      pen.fillStyle = light(data.colors[kind]) ? "#1f2430" : "#ffffff";
      pen.textAlign = "left";
      pen.fillText(data.kinds[kind], x + 5, y + ROW / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }

  function light(color) {
    const part = (at) => parseInt(color.slice(at, at + 2), 16);
    return 0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5) > 150;
  }

  function outline(ink) {
    const { one, span } = hovered, x = Math.max(toX(span[0]), MARGIN);
    const end = Math.min(toX(span[1]), width() - PAD);
    pen.strokeStyle = ink;
    pen.strokeRect(x - 0.5, one.y - 0.5, Math.max(end - x, 1) + 1, ROW + 1);
    if (span.length > 3) {
      const other = lines.find((line) => line.number === span[3]);
      if (other) pen.strokeRect(x - 0.5, other.y - 0.5, Math.max(end - x, 1) + 1, ROW + 1);
    }
  }

  /* Returns the index of the first span that ends after this time. */
  function from(list, time) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][1] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function seconds(value) {
    if (value >= 1) return value.toFixed(value >= 100 ? 0 : 2) + " s";
    return value >= 1e-3 ? (value * 1e3).toFixed(value >= 0.1 ? 0 : 1) + " ms" : (value * 1e6).toFixed(0) + " µs";
  }

  /* Says what the rows that a span waits for do during the wait. The longest kinds come first. */
  function meanwhile(span, own) {
    const party = span.length > 3 ? data.rows[span[3]].name : data.waits_for[span[2]];
    const rows = data.rows.filter((row, number) =>
      number !== own && (row.name === party || (/worker/.test(party) && !/^worker \d/.test(party) && row.group === "envs")));
    const sums = new Map();
    for (const row of rows) {
      for (let n = from(row.spans, span[0]); n < row.spans.length && row.spans[n][0] < span[1]; n++) {
        const [t0, t1, kind] = row.spans[n], inside = Math.min(t1, span[1]) - Math.max(t0, span[0]);
        if (inside > 0) sums.set(kind, (sums.get(kind) || 0) + inside);
      }
    }
    const total = rows.length * (span[1] - span[0]);
    return [...sums.entries()].sort((a, b) => b[1] - a[1]).slice(0, 3)
      .map(([kind, part]) => data.kinds[kind] + " " + Math.round((100 * part) / total) + " %").join(", ");
  }

  function tell(place) {
    const { one, span } = hovered, kind = span[2];
    tip.replaceChildren();
    const first = make("div", "", tip);
    make("b", "", first).textContent = one.row.name + ": " + data.kinds[kind];
    first.append("  " + seconds(span[1] - span[0]));
    make("div", "", tip).textContent = "from " + span[0].toFixed(3) + " s to " + span[1].toFixed(3) + " s";
    const party = data.waits_for[kind];
    if (party) {
      make("div", "", tip).textContent = "waits for: " + (span.length > 3 ? data.rows[span[3]].name : party);
      const doing = meanwhile(span, one.number);
      if (doing) make("div", "", tip).textContent = "meanwhile: " + doing;
    }
    if (data.about[kind]) make("div", "fw-why", tip).textContent = data.about[kind];
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const left = Math.min(place.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
    tip.style.left = Math.max(left, 0) + "px";
    const below = place.clientY + 16 + tip.offsetHeight <= window.innerHeight;
    tip.style.top = place.clientY - box.top + (below ? 16 : -12 - tip.offsetHeight) + "px";
  }

  function locate(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const one = lines.find((line) => line.row && y >= line.y && y < line.y + ROW + GAP);
    if (!one || x < MARGIN) return null;
    const slack = ((view[1] - view[0]) / room()) * 1.5, time = toTime(x), list = one.row.spans;
    let best = null;
    for (let n = from(list, time - slack); n < list.length && list[n][0] <= time + slack; n++) {
      const distance = Math.max(list[n][0] - time, time - list[n][1], 0);
      if (!best || distance < best.distance) best = { one, span: list[n], distance };
    }
    return best;
  }

  function show(begin, end) {
    const least = 1e-5, most = whole[1] - whole[0], length = Math.min(Math.max(end - begin, least), most);
    const start = Math.min(Math.max(begin, whole[0]), whole[1] - length);
    view = [start, start + length];
    following = length > 0.999 * most;
    draw();
  }

  const zoom = (factor, around) => show(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  function reset() { show(whole[0], whole[1]); }

  canvas.onwheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the wheel alone scrolls
    const x = Math.max(event.clientX - canvas.getBoundingClientRect().left, MARGIN);
    event.preventDefault();
    zoom(Math.exp(Math.sign(event.deltaY) * 0.25), toTime(x));
  };
  canvas.onpointerdown = (event) => {
    dragging = { x: event.clientX, view: view.slice() };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointerup = () => { dragging = null; };
  canvas.onpointermove = (event) => {
    if (dragging) {
      const moved = ((dragging.x - event.clientX) / room()) * (dragging.view[1] - dragging.view[0]);
      tip.hidden = true;
      show(dragging.view[0] + moved, dragging.view[1] + moved);
      return;
    }
    hovered = locate(event);
    if (hovered) tell(event); else tip.hidden = true;
    draw();
  };
  canvas.onpointerleave = () => { hovered = null; tip.hidden = true; draw(); };
  canvas.ondblclick = reset;
  canvas.onkeydown = (event) => {
    const length = view[1] - view[0], middle = (view[0] + view[1]) / 2;
    const keys = {
      ArrowLeft: () => show(view[0] - length / 8, view[1] - length / 8),
      ArrowRight: () => show(view[0] + length / 8, view[1] + length / 8),
      "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle), 0: reset,
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  };
  const watcher = new ResizeObserver(resize), scheme = matchMedia("(prefers-color-scheme: dark)");
  watcher.observe(element);
  scheme.addEventListener("change", draw);
  take(json);
  return { update: take, destroy() { watcher.disconnect(); scheme.removeEventListener("change", draw); element.replaceChildren(); } };
}
