// Lines of the last quarter of an hour, one for each model.

import { draw, element, make, show } from "./common.js";

const SECONDS = 900;
const HEIGHT = 84;
const HOLE = 60;
const GAP = 18;
const KINDS = [
  ["tokens/s", (point) => point[1], 1],
  ["rows", (point) => point[2], 0],
  ["first token, s", (point) => point[4], 2],
];

function nice(most) {
  const step = 10 ** Math.floor(Math.log10(Math.max(most, 0.01)));
  return [1, 2, 5, 10].map((one) => one * step).find((one) => one >= most);
}

function chart(title, series, width, digits) {
  const made = make("div");
  const newest = series.map(({ points }) => points.findLast((point) => point[1] !== null)?.[1]).filter((one) => one !== undefined);
  const sum = title.endsWith(", s") ? Math.max(...newest) : newest.reduce((all, one) => all + one, 0);
  const now = make("p");
  now.append(make("strong", newest.length ? sum.toFixed(digits) : "–"), make("span", title, "small"));
  const most = nice(Math.max(...series.flatMap(({ points }) => points.map((point) => point[1] ?? 0)), 0.01));
  const picture = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}, last 15 minutes` });
  const [top, bottom] = [16, HEIGHT - 18];
  const x = (ago) => width - 1 - (Math.min(SECONDS, ago) / SECONDS) * (width - 2);
  const y = (value) => bottom - (value / most) * (bottom - top);
  for (const at of [top, bottom]) picture.append(draw("line", { x1: 0, x2: width, y1: at, y2: at, class: "grid" }));
  picture.append(draw("text", { x: 0, y: 12, class: "soft" }, String(Number(most.toPrecision(2)))));
  picture.append(draw("text", { x: 0, y: HEIGHT - 3, class: "soft" }, "15 min ago"));
  picture.append(draw("text", { x: width, y: HEIGHT - 3, class: "soft", "text-anchor": "end" }, "now"));
  for (const { kind, points } of series) {
    let path = "";
    let before = Infinity;
    for (const [ago, value] of points.filter((point) => point[1] !== null)) {
      // a line has a hole where nobody asked for a minute; a point by itself is seen as well
      path += `${before - ago > HOLE ? "M" : "L"}${x(ago).toFixed(1)} ${y(value).toFixed(1)}h.01`;
      before = ago;
    }
    if (path) picture.append(draw("path", { d: path, class: `plot ${kind}`, "stroke-linecap": "round" }));
  }
  made.append(now, picture);
  return made;
}

export function showCharts(history) {
  const models = Object.keys(history);
  const wide = element("charts").clientWidth || 300;
  const width = Math.floor((wide - 2 * GAP) / 3);
  const made = KINDS.map(([title, value, digits]) => {
    const series = models.map((model, at) => ({ kind: `l${at % 4}`, points: history[model].map((point) => [point[0], value(point)]) }));
    return chart(title, series, width, digits);
  });
  show("charts", ...(models.length ? made : [make("p", "No model has been asked yet.", "small")]));
  const lines = models.map((model, at) => {
    const one = make("span");
    one.append(make("i", "", `l${at % 4}`), model);
    return one;
  });
  show("lines", ...(models.length > 1 ? lines : []));
}

// Bars of tokens a day.
export function dayBars(days, since, today) {
  const width = element("days").clientWidth || 300;
  const from = new Date(`${since}T12:00`);
  const count = Math.round((new Date(`${today}T12:00`) - from) / 864e5) + 1;
  const computed = new Map(days.map((one) => [one.day, one.prompt_tokens - one.cached_tokens + one.answered_tokens]));
  const most = Math.max(1, ...computed.values());
  const picture = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "tokens computed each day" });
  const each = width / count;
  for (let at = 0; at < count; at += 1) {
    const day = new Date(from.getTime() + at * 864e5).toISOString().slice(0, 10);
    const tokens = computed.get(day) ?? 0;
    const high = Math.max(tokens ? 2 : 0, (tokens / most) * (HEIGHT - 40));
    const bar = draw("rect", { x: at * each, y: HEIGHT - 18 - high, width: Math.max(1, each - 3), height: high, rx: 2, class: "weights" });
    bar.append(draw("title", {}, `${day}: ${tokens.toLocaleString()} tokens`));
    picture.append(bar);
  }
  picture.append(draw("line", { x1: 0, x2: width, y1: HEIGHT - 18, y2: HEIGHT - 18, class: "grid" }));
  picture.append(draw("text", { x: 0, y: 12, class: "soft" }, `${most.toLocaleString()} tokens on the busiest day`));
  picture.append(draw("text", { x: 0, y: HEIGHT - 3, class: "soft" }, from.toLocaleDateString()));
  picture.append(draw("text", { x: width, y: HEIGHT - 3, class: "soft", "text-anchor": "end" }, "today"));
  return picture;
}
