// This module formats numbers and times, and creates elements.

const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Formats a number with three digits, and with k, M or G if it is large: 12.3k. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS) if (size >= unit) return `${digits(value / unit)}${letter}`;
  return digits(value);
}

/** Formats the ticks of an axis. All have the number of decimal places that distinguishes them. */
export function ticks(values, step) {
  const most = Math.max(0, ...values.map(Math.abs)), [unit, letter] = UNITS.find(([size]) => most >= size) ?? [1, ""];
  let places = 0;
  while (places < 9 && Math.abs((step / unit) * 10 ** places - Math.round((step / unit) * 10 ** places)) > 1e-6) places += 1;
  return values.map((value) => (value === 0 ? "0" : `${(value / unit).toFixed(places)}${letter}`));
}

function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return String(Math.round(value));
  if (size >= 9.995) return value.toFixed(1).replace(/\.0$/, "");
  if (size >= 0.0995) return value.toFixed(2).replace(/\.?0+$/, "");
  return Number(value.toPrecision(2)).toString();
}

/** Formats a whole number with all digits: 12,345. */
export const whole = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : "–");

export const percent = (share) => (Number.isFinite(share) ? `${digits(100 * share)} %` : "–");

/** Formats seconds as 0:42, 12:05 or 3:12:05. */
export function clock(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const all = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, String(all % 60).padStart(2, "0")];
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/** Says how long ago something was. */
export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** Formats a short duration: 3 ms, 1.2 s. */
export function spell(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds >= 90) return clock(seconds);
  return seconds < 0.95 ? `${digits(1000 * seconds)} ms` : `${digits(seconds)} s`;
}

/** Replaces invisible characters and those that reverse text by their numbers, because the text may come from anywhere. */
const plain = (text) => (typeof text !== "string" ? text
  : text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`));

/** Creates an element with properties and children. Text is never parsed as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  if ("textContent" in properties) element.textContent = plain(properties.textContent);
  element.append(...children.map(plain));
  return element;
}

export const find = (id) => document.getElementById(id);

/** Sets a text only if it changes, so that selections and layouts stay. */
export function write(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Shows the `data-tip` of an element next to the pointer, at once and also on touch, unlike `title`. */
export function watchTips(tip) {
  const show = (event) => {
    const owner = event.target.closest?.("[data-tip], [title]");
    if (owner?.title) {
      owner.dataset.tip = owner.title;
      owner.removeAttribute("title");
    }
    if (!owner?.dataset.tip) { tip.hidden = true; return; }
    write(tip, owner.dataset.tip);
    tip.hidden = false;
    placeTip(tip, event.clientX, event.clientY);
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("pointerleave", () => { tip.hidden = true; });
}

export function placeTip(tip, x, y) {
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
}
