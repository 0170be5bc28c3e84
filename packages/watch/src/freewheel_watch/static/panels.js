// This module fills the panels that show the present state of one run.

import { clock, find, make, percent, short, spell, whole, write } from "./format.js";

// ---------------------------------------------------------------------------------------------------------------- header

export function showHead(name, about, head) {
  write(find("name"), name);
  document.title = `${name} · Freewheel`;
  const state = find("state");
  state.hidden = false;
  state.className = `pill ${head.state}`;
  state.dataset.tip = head.why;
  write(state, head.state);
  const facts = [["", about.env], ["", about.algo], ["", about.mode], ["seed", about.seed], ["workers", about.workers],
    ["envs", about.envs]].filter(([, value]) => value !== null && value !== undefined && value !== "");
  find("facts").replaceChildren(...facts.map(([word, value]) => make("span", {}, word ? `${word} ` : "", make("b", { textContent: value }))));
  const known = Number.isFinite(head.progress);
  find("progress").hidden = !Number.isFinite(head.wall_s);
  find("progress-bar").parentElement.hidden = !known;
  find("progress-bar").style.width = `${100 * (head.progress ?? 0)}%`;
  const parts = [known ? percent(head.progress) : "", `${clock(head.wall_s)} run`, Number.isFinite(head.eta_s) ? `about ${clock(head.eta_s)} to go` : ""];
  write(find("progress-text"), parts.filter(Boolean).join(" · "));
}

// ----------------------------------------------------------------------------------------------------------------- tiles

export function showTiles(tiles) {
  const box = find("tiles");
  const wanted = tiles.map((tile) => tile.name).join();
  if (box.dataset.names !== wanted) {
    box.dataset.names = wanted;
    box.replaceChildren(...tiles.map((tile) => make("div", { className: "tile" },
      make("div", { className: "label" }), make("div", { className: "value" }), make("div", { className: "target" }))));
  }
  tiles.forEach((tile, at) => {
    const element = box.children[at];
    element.className = `tile ${tile.state}`;
    element.dataset.name = tile.name;
    element.dataset.value = tile.value ?? "";
    element.dataset.tip = [tile.help, tile.reason].filter(Boolean).join("\n");
    const [label, value, target] = element.children;
    write(label, tile.label);
    const shown = tile.unit === "%" ? [percent(tile.value).replace(" %", ""), Number.isFinite(tile.value) ? "%" : ""] : [short(tile.value), tile.unit];
    if (value.dataset.shown !== shown.join(" ")) {
      value.dataset.shown = shown.join(" ");
      value.replaceChildren(shown[0], make("span", { className: "unit", textContent: shown[1] }));
    }
    write(target, targetWords(tile));
  });
}

function targetWords(tile) {
  const show = tile.unit === "%" ? (value) => percent(value).replace(" %", "") : short;
  const unit = tile.unit === "%" ? " %" : "";
  const [low, high] = [Number.isFinite(tile.low) && tile.low > 0, Number.isFinite(tile.high)];
  const limits = low && high ? `${show(tile.low)}–${show(tile.high)}${unit}` : low ? `at least ${show(tile.low)}${unit}` : high ? `at most ${show(tile.high)}${unit}` : "";
  if (tile.state === "good") return limits ? `✓ target: ${limits}` : "✓ on target";
  if (tile.state === "bad") return `✗ target: ${limits}${tile.reason ? `; ${tile.reason}` : ""}`;
  if (tile.state === "unreachable") return tile.reason;
  return tile.note ?? tile.reason ?? "";
}

// --------------------------------------------------------------------------------------------------------------- workers

const DENSE = 24; // rows are short if there are more workers

export function showWorkers(workers, learner, words, mode) {
  const box = find("worker-list"), none = find("no-workers");
  none.hidden = workers !== null && workers.length > 0;
  write(none, workers === null ? "No worker is active: the run has not begun yet or has ended."
    : `In ${mode ?? "this"} mode the trainer steps the environments itself, so there are no worker processes.`);
  find("workers").classList.toggle("many", (workers?.length ?? 0) > DENSE);
  box.classList.toggle("dense", (workers?.length ?? 0) > DENSE);
  showLearner(learner, words);
  const list = workers ?? [];
  while (box.children.length > list.length) box.lastChild.remove();
  while (box.children.length < list.length) box.append(workerRow());
  const fastest = Math.max(1e-9, ...list.map((worker) => worker.steps_per_s ?? 0));
  list.forEach((worker, at) => fillWorker(box.children[at], worker, fastest, words));
  showCounts(list, words);
}

function workerRow() {
  return make("div", { className: "worker" }, make("span", { className: "number" }),
    make("span", { className: "doing" }, make("i", { className: "swatch" }), make("span")),
    make("span", { className: "rate" }, make("i"), make("span")), make("span", { className: "restarts" }));
}

function fillWorker(row, worker, fastest, words) {
  const [number, doing, rate, restarts] = row.children;
  const look = words.states[worker.state] ?? { label: worker.state, color: "#999999", text: "" };
  row.classList.toggle("alert", Boolean(worker.alert));
  row.dataset.worker = worker.worker;
  row.dataset.state = worker.state;
  row.dataset.tip = [`Worker ${worker.worker}: ${worker.alert || look.text}`,
    worker.waits_for ? `Waits for: ${worker.waits_for}` : "", `${look.label} since ${spell(worker.since_s)}, ${whole(worker.steps)} steps so far`,
    worker.pid ? `Process ${worker.pid}` : ""].filter(Boolean).join("\n");
  write(number, String(worker.worker));
  doing.firstChild.style.background = look.color;
  write(doing.lastChild, worker.alert && worker.state !== "lost" && worker.state !== "down" ? "replaced" : look.label);
  rate.firstChild.style.width = `${(100 * (worker.steps_per_s ?? 0)) / fastest}%`;
  write(rate.lastChild, `${short(worker.steps_per_s)} steps/s`);
  restarts.classList.toggle("some", worker.restarts > 0);
  const dense = row.parentElement.classList.contains("dense");
  write(restarts, worker.restarts ? (dense ? `↻ ${worker.restarts}` : `${worker.restarts} restart${worker.restarts > 1 ? "s" : ""}`) : dense ? "" : "no restarts");
}

function showCounts(list, words) {
  const counts = new Map();
  for (const worker of list) counts.set(worker.state, (counts.get(worker.state) ?? 0) + 1);
  const chips = [...counts].sort((a, b) => b[1] - a[1]).map(([state, count]) => {
    const look = words.states[state] ?? { label: state, color: "#999999", text: "" };
    const chip = make("span", {}, swatch(look.color), `${count} ${look.label}`);
    chip.dataset.tip = look.text;
    return chip;
  });
  const restarts = list.reduce((sum, worker) => sum + (worker.restarts ?? 0), 0);
  if (restarts) chips.push(make("span", {}, `${restarts} restarts so far`));
  find("worker-counts").replaceChildren(...chips);
}

function showLearner(learner, words) {
  const box = find("learner");
  box.hidden = !learner?.length;
  box.replaceChildren(...(learner ?? []).map((part) => {
    const text = words.shares.learner[part.doing] ?? "";
    const doing = part.waits_for ? `waits for ${part.waits_for}` : part.doing;
    const element = make("div", {}, make("b", { textContent: `${part.name}: ` }), doing,
      make("span", { textContent: part.since_s > 2 ? ` (since ${spell(part.since_s)})` : "" }));
    element.dataset.tip = text;
    return element;
  }));
}

// ---------------------------------------------------------------------------------------------------------------- shares

const WINDOW = 60; // seconds

/** Shows where the last minute went. Workers and learner have a strip each, and each row of metrics is a column. */
export function showShares(recent, columns, words, running) {
  const box = find("shares");
  if (!box.children.length) {
    for (const party of ["worker", "learner"]) {
      const strip = make("div", { className: "strip" }, make("h3", { textContent: party === "worker" ? "Time of the workers" : "Time of the learner" }),
        make("canvas"), make("div", { className: "ago" }, make("span"), make("span")), make("div", { className: "legend" }));
      strip.dataset.party = party;
      box.append(strip);
    }
  }
  for (const strip of box.children) {
    const [from, to] = strip.querySelector(".ago").children;
    write(from, running ? "a minute ago" : "a minute before the end");
    write(to, running ? "now" : "end");
    drawStrip(strip, recent, columns, words);
  }
}

function drawStrip(strip, recent, columns, words) {
  const party = strip.dataset.party, [, canvas, , legend] = strip.children;
  const kinds = columns.map((name, at) => [name, at]).filter(([name]) => name.startsWith(`${party}/`)).map(([name, at]) => [name.slice(party.length + 1), at]);
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), now = recent.length ? recent[recent.length - 1][0] : 0;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const sums = new Map(kinds.map(([kind]) => [kind, 0]));
  let seconds = 0;
  recent.forEach((row, index) => {
    const begin = index ? recent[index - 1][0] : row[0] - 1, span = Math.max(row[0] - begin, 0);
    if (kinds.every(([, at]) => row[at] === null)) return;
    const [left, right] = [begin, row[0]].map((at) => Math.round(ratio * width * (1 - (now - at) / WINDOW)) / ratio);
    let top = height;
    seconds += span;
    for (const [kind, at] of kinds) {
      const share = row[at] ?? 0, size = share * height;
      sums.set(kind, sums.get(kind) + share * span);
      pen.fillStyle = words.colors[kind] ?? "#999999";
      pen.fillRect(left, top - size, Math.max(right - left, 1 / ratio), size);
      top -= size;
    }
  });
  const shown = [...sums].map(([kind, sum]) => [kind, seconds ? sum / seconds : 0]).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  legend.replaceChildren(...shown.map(([kind, share]) => {
    const chip = make("span", {}, swatch(words.colors[kind] ?? "#999999"), `${kind} ${percent(share)}`);
    chip.dataset.tip = words.shares[party][kind] ?? "";
    return chip;
  }));
  if (!shown.length) write(legend, "nothing reported in the last minute");
}

// ---------------------------------------------------------------------------------------------------------------- ledger

const LEDGER = [
  ["trained", "trained", "#2e9e5b", "Rows that an update has used, or that are stored in the replay buffer"],
  ["queued", "waiting", "#3b82c4", "Finished rows that wait for the learner"],
  ["open", "being written", "#9b7fd1", "Rows of fragments that workers are still writing"],
];

export function showLedger(ledger) {
  const list = find("ledger-list"), bar = find("ledger-bar"), check = find("ledger-check");
  if (!ledger) {
    list.replaceChildren(make("span", { className: "note", textContent: "no row of metrics yet" }));
    bar.replaceChildren();
    write(check, "");
    return;
  }
  const causes = Object.entries(ledger.dropped ?? {}), dropped = causes.reduce((sum, [, count]) => sum + count, 0);
  const parts = LEDGER.map(([key, label, color, text]) => [key, label, color, text, ledger[key] ?? 0]);
  const why = causes.length ? causes.map(([cause, count]) => `${cause} ${whole(count)}`).join(", ") : "none";
  parts.push(["dropped", dropped ? `dropped: ${why}` : "dropped", "#c0392b", `Rows that were dropped, by cause: ${why}`, dropped]);
  const sum = parts.reduce((total, part) => total + part[4], 0), balanced = sum === ledger.produced;
  bar.replaceChildren(...parts.filter((part) => part[4] > 0).map(([, label, color, text, count]) => {
    const piece = make("i");
    piece.style.width = `${(100 * count) / Math.max(sum, 1)}%`;
    piece.style.background = color;
    piece.dataset.tip = `${whole(count)} ${label}\n${text}`;
    return piece;
  }));
  const entries = [entry("produced", "produced", null, "Rows that all environments have written", ledger.produced), make("span", { className: "sign", textContent: balanced ? "=" : "≠" })];
  parts.forEach(([key, label, color, text, count], at) => {
    if (at) entries.push(make("span", { className: "sign", textContent: "+" }));
    entries.push(entry(key, label, color, text, count));
  });
  list.replaceChildren(...entries);
  check.classList.toggle("wrong", !balanced);
  write(check, balanced ? "✓ every row is accounted for" : `✗ ${whole(Math.abs(sum - ledger.produced))} rows are not accounted for`);
}

function entry(key, label, color, text, count) {
  const element = make("div", { className: "entry" }, make("b", { textContent: whole(count) }), make("span", {}, ...(color ? [swatch(color)] : []), label));
  element.dataset.tip = text;
  element.dataset.key = key;
  element.dataset.value = count;
  return element;
}

export function swatch(color) {
  const square = make("i", { className: "swatch" });
  square.style.background = color;
  return square;
}

// -------------------------------------------------------------------------------------------------------------- messages

export function showMessages(messages) {
  find("messages").hidden = !messages?.length;
  find("message-list").replaceChildren(...(messages ?? []).map((message) => make("li", {},
    ...(Number.isFinite(message.wall_s) ? [make("time", { textContent: clock(message.wall_s) })] : []), message.text)));
}
