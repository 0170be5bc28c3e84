// This module chooses the runs of the page, receives messages of the server, and redraws the page.

import { Chart, color, line } from "./charts.js";
import { ago, clock, find, make, short, watchTips, whole, write } from "./format.js";
import { showHead, showLedger, showMessages, showShares, showTiles, showWorkers, swatch } from "./panels.js";

const MOST = 12; // runs at once: the open one and those that are compared with it
const WINDOW = 60; // seconds that the strips cover
const TIMELINE_EVERY = 1500; // milliseconds between two requests for a timeline
const SILENCE = 15000; // milliseconds without a message after which the server is silent
const REST = 5000; // milliseconds after which a hidden page stops to receive news
const PATIENCE = 3000; // milliseconds in which a lost connection may come back

const page = {
  words: { shares: { worker: {}, learner: {} }, states: {}, colors: {} },
  columns: [], kinds: [],   // columns of points and of shares
  runs: new Map(),          // name -> data of a run that is shown
  listed: [], place: "", newest: null,
  open: null, compared: [],   // names
  x: "env_steps",
  source: null, heard: 0, lost: 0, resting: false, timeline: { stamp: null, asked: 0, chart: null },
  late: false,              // whether there is news since it was last drawn
};
const tip = find("tip");
const charts = { return_mean: new Chart(find("chart-return"), tip), eval_return: new Chart(find("chart-eval"), tip, { held: true }), steps_per_s: new Chart(find("chart-speed"), tip, { fromZero: true }) };

// ------------------------------------------------------------------------------------------------------------- addresses

function readAddress() {
  const given = new URLSearchParams(location.search);
  page.open = given.get("run");
  page.compared = given.getAll("with").slice(0, MOST - 1);
  page.x = given.get("x") === "wall_s" ? "wall_s" : "env_steps";
}

function writeAddress() {
  const given = new URLSearchParams();
  if (page.open) given.set("run", page.open);
  for (const name of page.compared) given.append("with", name);
  if (page.x === "wall_s") given.set("x", page.x);
  history.replaceState(null, "", given.size ? `/?${given}` : "/");
}

// ---------------------------------------------------------------------------------------------------------------- server

function listen() {
  page.source?.close();
  page.resting = false;
  const asked = new URLSearchParams([page.open, ...page.compared].filter(Boolean).map((name) => ["run", name]));
  const source = new EventSource(`/events?${asked}`);
  page.source = source;
  const on = (kind, take) => source.addEventListener(kind, (event) => {
    if (source !== page.source) return;
    page.heard = Date.now();
    page.lost = 0;
    take(JSON.parse(event.data));
    page.late = true;
  });
  on("hello", (message) => { page.words = message.words; page.columns = message.columns; page.kinds = message.kinds; });
  on("runs", takeRuns);
  on("run", takeRun);
  on("alive", () => {});
  source.onopen = () => { page.heard = Date.now(); page.lost = 0; };
  source.onerror = () => { page.lost ||= Date.now(); };
}

function takeRuns(message) {
  page.listed = message.runs;
  page.place = message.place;
  const known = page.open && message.runs.some((run) => run.name === page.open);
  if (!known && message.newest) choose(message.newest, []);
}

function takeRun(message) {
  let run = page.runs.get(message.name);
  if (!run || message.full) {
    run = { points: [], recent: [], about: {}, head: null, tiles: [], workers: null, learner: [], ledger: null, messages: [], timeline: null, tail: null };
    page.runs.set(message.name, run);
  }
  const { points = [], recent = [], ...sections } = message;
  run.points.push(...points);
  run.recent.push(...recent);
  Object.assign(run, sections);
  const newest = run.recent.length ? run.recent[run.recent.length - 1][0] : 0;
  run.recent = run.recent.filter((row) => row[0] >= newest - WINDOW);
}

/** Stops the news of a hidden page. A browser has only six connections to a server for all its tabs. */
function rest() {
  page.resting = true;
  page.source?.close();
}

// --------------------------------------------------------------------------------------------------------------- choices

function choose(name, compared = page.compared.filter((other) => other !== name)) {
  page.open = name;
  page.compared = compared.slice(0, MOST - 1);
  for (const known of [...page.runs.keys()]) if (known !== name && !page.compared.includes(known)) page.runs.delete(known);
  page.timeline.chart?.destroy();
  page.timeline = { stamp: null, asked: 0, chart: null };
  writeAddress();
  listen();
  page.late = true;
}

function compare(names, on) {
  const others = page.compared.filter((name) => !names.includes(name));
  choose(page.open, on ? [...others, ...names.filter((name) => name !== page.open)] : others);
}

// --------------------------------------------------------------------------------------------------------------- drawing

function draw() {
  showBanner();
  if (!page.late || document.hidden) return;
  page.late = false;
  showRuns();
  drawCurves();
  const run = page.runs.get(page.open);
  if (!run?.head) return;
  showHead(page.open, run.about, run.head);
  showTiles(run.tiles);
  showWorkers(run.workers, run.learner, page.words, run.about.mode);
  showLedger(run.ledger);
  showMessages(run.messages);
  drawTime(run);
}

function showBanner() {
  if (page.resting) return;
  const refused = page.source?.readyState === EventSource.CLOSED, now = Date.now();
  const silent = (page.lost && now - page.lost > PATIENCE) || (page.heard && now - page.heard > SILENCE);
  const banner = find("banner");
  banner.hidden = !refused && !silent;
  if (refused) write(banner, "This page has ended. Start it again: freewheel watch");
  else if (silent) write(banner, "The server of this page does not answer: is freewheel watch still running? Trainings continue without it.");
}

/** Returns the curves of the open run and of the runs that are compared with it. Several runs of a group form one curve with a band. */
function curvesShown() {
  const names = [page.open, ...page.compared].filter((name) => page.runs.get(name)?.points);
  const groups = new Map();
  for (const name of names) {
    const group = page.listed.find((run) => run.name === name)?.group ?? null;
    const key = group ?? name;
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups].map(([key, members], at) => ({
    label: members.length > 1 ? `${key} (${members.length} seeds: mean, minimum to maximum)` : members[0], members, color: color(at),
  }));
}

function drawCurves() {
  const shown = curvesShown(), x = page.columns.indexOf(page.x);
  for (const [column, chart] of Object.entries(charts)) {
    const y = page.columns.indexOf(column);
    chart.draw(shown.map((curve) => ({ ...curve, lines: curve.members.map((name) => line(allPoints(page.runs.get(name)), x, y)) })), page.x === "wall_s");
  }
  find("legend").replaceChildren(...shown.map((curve) => make("span", {}, swatch(curve.color), curve.label)));
  for (const button of document.querySelectorAll("[data-x]")) button.setAttribute("aria-pressed", String(button.dataset.x === page.x));
}

const allPoints = (run) => (run.tail ? [...run.points, run.tail] : run.points);

function drawTime(run) {
  const gantt = typeof freewheelGantt === "function" && run.timeline !== null;
  find("gantt").hidden = !gantt;
  find("shares").hidden = gantt && page.timeline.chart !== null;
  find("time").classList.toggle("wide", find("shares").hidden);
  if (!find("shares").hidden) write(find("time-title"), "the last minute");
  if (!find("shares").hidden) showShares(run.recent, page.kinds, page.words, ["running", "silent"].includes(run.head.state));
  if (gantt && run.timeline !== page.timeline.stamp && Date.now() - page.timeline.asked > TIMELINE_EVERY) askTimeline(page.open, run.timeline);
}

async function askTimeline(name, stamp) {
  page.timeline.asked = Date.now();
  const answer = await fetch(`/timeline?${new URLSearchParams({ run: name })}`).catch(() => null);
  if (!answer?.ok || name !== page.open) return;
  const message = await answer.json();
  page.timeline.stamp = stamp;
  find("shares").hidden = true;
  find("time").classList.add("wide");
  write(find("time-title"), `the time from ${clock(message.begin)} to ${clock(message.begin + message.seconds)}`);
  if (page.timeline.chart) page.timeline.chart.update(message);
  else page.timeline.chart = freewheelGantt(find("gantt"), message);
}

// ------------------------------------------------------------------------------------------------------------------ runs

function showRuns() {
  write(find("runs-place"), page.place ? `in ${page.place}` : "");
  find("no-runs").hidden = page.listed.length > 0;
  const rows = [], groups = new Map();
  for (const run of page.listed) if (run.group) groups.set(run.group, [...(groups.get(run.group) ?? []), run]);
  const done = new Set();
  for (const run of page.listed) {
    const members = groups.get(run.group) ?? [];
    if (members.length < 2) { rows.push(runRow(run)); continue; }
    if (done.has(run.group)) continue;
    done.add(run.group);
    rows.push(groupRow(run.group, members), ...members.map((member) => runRow(member, "member")));
  }
  const body = find("run-list"), text = rows.map((row) => row.dataset.key).join("\n");
  if (body.dataset.key === text) return; // nothing has changed, so the box under the pointer must not be replaced
  body.dataset.key = text;
  body.replaceChildren(...rows);
}

const shownNow = (name) => name === page.open || page.compared.includes(name);

function box(names, label) {
  const input = make("input", { type: "checkbox", checked: names.every(shownNow), disabled: names.length === 1 && names[0] === page.open });
  input.setAttribute("aria-label", label);
  input.addEventListener("change", () => compare(names, input.checked));
  return input;
}

function runRow(run, className = "") {
  const open = make("button", { type: "button", textContent: run.name });
  open.addEventListener("click", () => choose(run.name));
  const state = make("span", { className: `pill ${run.state}`, textContent: run.state });
  const numbers = [run.seed ?? "–", Number.isFinite(run.steps) ? whole(run.steps) : "–", short(run.best), ago(Date.now() / 1000 - run.updated)];
  const row = make("tr", { className: run.name === page.open ? `${className} open` : className },
    make("td", {}, box([run.name], `compare ${run.name}`)), make("td", { className: "name" }, open), make("td", {}, state),
    ...[run.env, run.algo, run.mode].map((value) => make("td", { textContent: value ?? "–" })),
    ...numbers.map((value) => make("td", { className: "number", textContent: value })));
  row.dataset.run = run.name;
  row.dataset.key = JSON.stringify([run.name, run.state, numbers, row.className, shownNow(run.name)]);
  return row;
}

function groupRow(group, members) {
  const names = members.map((run) => run.name);
  const all = make("button", { type: "button", textContent: `${group}: ${members.length} seeds` });
  all.addEventListener("click", () => choose(names[0], names.slice(1)));
  all.dataset.tip = "Open all of them as their mean with a band from minimum to maximum";
  const cell = make("td", { colSpan: 9 }, all);
  const row = make("tr", { className: "group" }, make("td", {}, box(names, `compare all seeds of ${group}`)), cell);
  row.dataset.key = JSON.stringify([group, names, names.every(shownNow)]);
  return row;
}

// ----------------------------------------------------------------------------------------------------------------- begin

readAddress();
watchTips(tip);
for (const button of document.querySelectorAll("[data-x]")) {
  button.addEventListener("click", () => { page.x = button.dataset.x; writeAddress(); page.late = true; draw(); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { page.late = true; });
document.addEventListener("visibilitychange", () => {
  clearTimeout(page.rest);
  if (document.hidden) page.rest = setTimeout(rest, REST);
  else if (page.resting) listen();
  draw();
});
addEventListener("resize", () => { page.late = true; });
listen();
setInterval(draw, 250);
