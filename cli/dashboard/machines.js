// The picture of the machines: each with its memory and what it does, and the links of the ring between them.

import { age, clock, draw, element, make, number, show, size, table, words } from "./common.js";

const PARTS = [["weights", "weights"], ["caches", "caches"], ["other", "other models"], ["free", "free"]];
const [HIGH, WIDE, LOW] = [104, 84, 40]; // of a narrow machine and a wide one, and of one without its memory
const LEAST = 176;
const ACROSS = 92;
const DOWN = 40;
const doing = new Map(); // by ring and rank: what a member does, as last traced
let chosen = ""; // the deployment that is shown

export const takeTrace = (ring, members) => {
  for (const one of members) doing.set(`${ring} ${one.rank}`, one.trouble ? null : one);
};

// The word for what took most of a member's time.
function doingWord(shares) {
  const kinds = {
    computes: shares.compute + shares.build + shares.launch,
    sends: shares.seal + shares.send + shares.copy_out,
    waits: shares.wait,
    "is idle": shares.idle,
  };
  const [word, share] = Object.entries(kinds).sort((one, other) => other[1] - one[1])[0];
  return word === "is idle" ? "idle" : `${word} ${Math.round(Math.min(100, share))} %`;
}

function stateOf(found, node, ring, stage, running) {
  if (node.state === "offline") {
    const since = node.last_seen ? `away since ${clock(node.last_seen)}` : "never seen";
    return ring ? { text: since, kind: "bad", box: "away bad" } : { text: since, kind: "soft", box: "away" };
  }
  if (node.state === "draining") return { text: "drained", kind: "soft", box: "" };
  if (!ring) return { text: "in no ring", kind: "soft", box: "" };
  if (ring.phase !== "serving") return { text: words(ring.phase), kind: "soft", box: "" };
  const shares = doing.get(`${ring.ring} ${stage.rank}`);
  if (!running || !shares) return { text: "idle", kind: "good", box: "" };
  const text = doingWord(shares);
  return { text, kind: text === "idle" ? "good" : "busy", box: "" };
}

function memoryOf(node, ring, stage, planned) {
  const usable = Number(node.heartbeat.memory_usable);
  const own = planned.map((one) => one.ring);
  const taken = node.rings.filter((one) => own.includes(one.ring)).reduce((sum, one) => sum + Number(one.memory), 0);
  const other = node.rings.filter((one) => !own.includes(one.ring)).reduce((sum, one) => sum + Number(one.memory), 0);
  const caches = stage ? Math.min(Number(stage.kv_budget), taken) : 0;
  const parts = { weights: taken - caches, caches, other };
  return { usable, ...parts, free: Math.max(0, usable - taken - other) };
}

const meter = document.createElement("canvas").getContext("2d");
function fitted(text, width, font) {
  meter.font = font;
  if (meter.measureText(text).width <= width) return text;
  let short = text.slice(0, 200);
  while (short && meter.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}

function box(picture, at, one, high) {
  const { x, y, width } = at;
  picture.append(draw("rect", { x, y, width, height: high, rx: 8, class: `box ${one.state.box}` }));
  const line = (text, side, dy, kind, room, font) => {
    const where = { x: side === "end" ? x + width - 12 : x + 12, y: y + dy, "text-anchor": side, class: kind };
    const made = draw("text", where, fitted(text, room, font));
    if (made.textContent !== text) made.append(draw("title", {}, text));
    picture.append(made);
  };
  const [bold, plain, small] = ["600 14px system-ui", "13px system-ui", "12px system-ui"];
  meter.font = plain;
  const state = meter.measureText(one.state.text).width;
  if (high === LOW) {
    line(one.node.name, "start", 25, "name", width - state - 40, bold);
    line(one.state.text, "end", 25, one.state.kind, width - 24, plain);
    return;
  }
  const memory = one.memory;
  const taken = `${size(memory.usable - memory.free).replace(/ GiB$/, "")} of ${size(memory.usable)}`;
  meter.font = small;
  const room = width - meter.measureText(taken).width - 32;
  if (high === WIDE) {
    line(one.node.name, "start", 25, "name", width - state - 40, bold);
    line(one.state.text, "end", 25, one.state.kind, width - 24, plain);
    line(one.layers, "start", 46, "soft", room, small);
    line(taken, "end", 46, "soft", width - 24, small);
  } else {
    line(one.node.name, "start", 24, "name", width - 24, bold);
    line(one.state.text, "start", 45, one.state.kind, width - 24, plain);
    line(taken, "start", 92, "soft", width - 24, small);
    line(one.layers, "end", 92, "soft", room, small);
  }
  const whole = width - 24;
  let from = x + 12;
  const total = Math.max(1, memory.weights + memory.caches + memory.other + memory.free);
  for (const [part, said] of PARTS) {
    const long = (whole * memory[part]) / total;
    if (long < 0.5) continue;
    const bar = draw("rect", { x: from, y: y + 58, width: Math.max(1, long - 1), height: 13, rx: 2, class: part });
    bar.append(draw("title", {}, `${said}: ${size(memory[part])}`));
    picture.append(bar);
    from += long;
  }
}

// Where machines stand: rows that run to and fro, so that neighbours of a ring are neighbours here.
function places(count, width, left, high) {
  const columns = Math.max(1, Math.min(count, Math.floor((width - left + ACROSS) / (LEAST + ACROSS))));
  const each = Math.min(340, (width - left - ACROSS * (columns - 1)) / columns);
  return Array.from({ length: count }, (_, at) => {
    const row = Math.floor(at / columns);
    const column = row % 2 ? columns - 1 - (at % columns) : at % columns;
    return { row, column, x: left + column * (each + ACROSS), y: 2 + row * (high + (high === LOW ? 8 : DOWN)), width: each };
  });
}

const rate = (link) => (Number(link?.bytes_per_second) ? `${size(link.bytes_per_second)}/s` : "");
const delay = (link) => (link?.round_trip_us ? `${number(link.round_trip_us / 1000, link.round_trip_us < 1000 ? 2 : 1)} ms` : "");

function arrow(picture, path, busy) {
  picture.append(draw("path", { d: path, class: `link${busy ? " busy" : ""}`, "marker-end": "url(#arrow)" }));
}

function label(picture, x, y, text, anchor = "middle") {
  if (text) picture.append(draw("text", { x, y, "text-anchor": anchor, class: "soft" }, text));
}

// One link from a machine to the next; what closes the ring goes around the others.
function connect(picture, from, to, link, busy, rows, left, high) {
  const middle = (one) => one.x + one.width / 2;
  const both = [rate(link), delay(link)].filter(Boolean).join(" · ");
  if (from.row === to.row && Math.abs(from.column - to.column) === 1 && !(link?.closes && rows === 1)) {
    const right = to.x > from.x;
    const [begin, end] = right ? [from.x + from.width, to.x - 2] : [from.x, to.x + to.width + 2];
    const y = from.y + high / 2;
    arrow(picture, `M${begin} ${y}H${end}`, busy);
    label(picture, (begin + end) / 2, y - 8, rate(link));
    label(picture, (begin + end) / 2, y + 18, delay(link));
  } else if (from.column === to.column && Math.abs(from.row - to.row) === 1 && !link?.closes) {
    arrow(picture, `M${middle(from)} ${from.y + high}V${to.y - 2}`, busy);
    label(picture, middle(from) + 10, from.y + high + 16, rate(link), "start");
    label(picture, middle(from) + 10, from.y + high + 32, delay(link), "start");
  } else if (rows === 1) {
    const y = from.y + high + 20;
    arrow(picture, `M${middle(from)} ${from.y + high}V${y}H${middle(to)}V${to.y + high + 2}`, busy);
    label(picture, (middle(from) + middle(to)) / 2, y + 16, both);
  } else if (from.row % 2 && from.column > to.column && to.row === from.row - 1) {
    const y = from.y + high / 2;
    arrow(picture, `M${from.x} ${y}H${middle(to)}V${to.y + high + 2}`, busy);
    label(picture, middle(to) + 10, y - 8, both, "start");
  } else {
    const [begin, end] = [from.y + high / 2, to.y + high / 2];
    arrow(picture, `M${from.x} ${begin}H${left - 12}V${end}H${to.x - 2}`, busy);
    label(picture, from.x, from.y + high + 16, both && `back to the first: ${both}`, "start");
  }
}

function drawRing(ones, links, width, busy) {
  const narrow = places(ones.length, width, 0, HIGH)[0].width < 240;
  const high = !ones.some((one) => one.memory.usable) ? LOW : narrow ? HIGH : WIDE;
  const tall = places(ones.length, width, 0, high).some((one) => one.row > (one.column ? 1 : 0) && links.length);
  const left = tall ? 18 : 0;
  const where = places(ones.length, width, left, high);
  const rows = Math.max(...where.map((one) => one.row)) + 1;
  const below = !links.length ? 8 : rows === 1 ? 40 : left ? 28 : 10;
  const height = Math.max(...where.map((one) => one.y)) + high + below;
  const said = ones.map((one) => `${one.node.name}: ${one.state.text}, ${one.layers}`).join("; ");
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said });
  const marker = draw("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
  marker.append(draw("path", { d: "M0 0L8 4L0 8Z", class: "head-of-arrow" }));
  picture.append(marker);
  for (const [from, to, link] of links) connect(picture, where[from], where[to], link, busy, rows, left, high);
  ones.forEach((one, at) => box(picture, where[at], one, high));
  return picture;
}

function linksOf(found, ring, stages) {
  if (stages.length < 2) return [];
  return stages.map((stage, at) => {
    const next = stages[(at + 1) % stages.length];
    const own = ring.links.find((one) => one.from_rank === stage.rank && one.to_rank === next.rank);
    const between = (one) => [one.caller, one.called].sort().join() === [stage.member, next.member].sort().join();
    const known = own && Number(own.bytes_per_second) ? own : found.links.find((one) => one.host && between(one));
    return [at, (at + 1) % stages.length, { ...known, closes: at === stages.length - 1 }];
  });
}

export function showMachines(found, load) {
  const names = found.deployments.map((one) => one.plan.spec.name);
  if (!names.includes(chosen)) {
    const serving = found.deployments.find((one) => one.rings.some((ring) => ring.phase === "serving"));
    chosen = serving?.plan.spec.name ?? names[0] ?? "";
  }
  const deployment = found.deployments.find((one) => one.plan.spec.name === chosen);
  const planned = deployment?.plan.rings ?? [];
  const running = load.some((one) => one.model === chosen && one.running);
  const width = Math.max(240, Math.floor(element("picture").clientWidth || 600));
  const drawn = new Set();
  const pictures = [];
  for (const ring of deployment?.rings ?? []) {
    const plan = planned.find((one) => one.ring === ring.ring);
    const tensor = deployment.plan.spec.clear_links && !plan?.pipeline;
    const stages = (plan?.stages ?? []).filter((one) => found.nodes.some((node) => node.id === one.member));
    const ones = stages.map((stage) => {
      const node = found.nodes.find((one) => one.id === stage.member);
      drawn.add(node.id);
      const layers = tensor ? `1/${stages.length} of each layer` : `layers ${stage.first_layer}–${stage.end_layer - 1}`;
      const state = stateOf(found, node, ring, stage, running);
      return { node, state, layers, memory: memoryOf(node, ring, stage, planned) };
    });
    if (ones.length) pictures.push(drawRing(ones, linksOf(found, ring, stages), width, running && ring.phase === "serving"));
  }
  const rest = found.nodes.filter((one) => !drawn.has(one.id));
  if (rest.length) {
    const ones = rest.map((node) => {
      const state = stateOf(found, node, null, null, false);
      return { node, state, layers: node.rings.length ? "serves another model" : "", memory: memoryOf(node, null, null, planned) };
    });
    for (const one of ones) if (one.layers) one.state = { text: "", kind: "soft", box: "" };
    pictures.push(drawRing(ones, [], width, false));
  }
  show("picture", ...pictures);
  const legend = PARTS.map(([part, said]) => {
    const one = make("span");
    one.append(make("i", "", part), said);
    return one;
  });
  show("legend", ...legend);
  const tabs = names.map((one) => {
    const tab = make("button", one);
    tab.type = "button";
    tab.dataset.model = one;
    tab.setAttribute("aria-pressed", one === chosen);
    return tab;
  });
  show("which", ...(names.length > 1 ? tabs : []));
  show(
    "nodes",
    table(
      ["machine", "state", "memory", "prompts on disk", "version", ""],
      found.nodes.map((one) => [
        one.name,
        [one.state, one.state === "online" ? "good" : "soft"],
        `${size(one.heartbeat.memory_used)} of ${size(one.heartbeat.memory_usable)}`,
        `${size(one.heartbeat.stored_bytes)}${one.heartbeat.stored_broken ? ", takes no writes" : ""}`,
        one.software_version,
        one.trouble || one.idle || (one.state === "offline" ? `last seen ${age(found.now, one.last_seen)}` : ""),
      ]),
    ),
  );
}

export function onChoice(again) {
  element("which").addEventListener("click", (event) => {
    if (!event.target.dataset.model) return;
    chosen = event.target.dataset.model;
    again();
  });
  new ResizeObserver(again).observe(element("picture"));
}

export const shownModel = () => chosen;
