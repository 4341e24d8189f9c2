// What all parts of the page use. Every text is set as text, never as markup: names come from other machines.

const token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
sessionStorage.setItem("token", token);
history.replaceState(null, "", location.pathname); // not into the history, nor into a picture of the window

export const element = (id) => document.getElementById(id);

export function make(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

export function draw(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// Cells are texts, numbers (to the right) or [text, class].
export function table(columns, rows) {
  const made = make("table");
  const head = made.createTHead().insertRow();
  const isNumber = (cell) => typeof cell === "number" || cell?.[1] === "number";
  const numbers = columns.map((_, at) => rows.length > 0 && rows.every((row) => isNumber(row[at])));
  columns.forEach((column, at) => {
    const cell = make("th", column, numbers[at] ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  });
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((cell, at) => {
      const [value, kind] = Array.isArray(cell) ? cell : [cell, numbers[at] ? "number" : ""];
      const made = make("td", typeof value === "number" ? value.toLocaleString() : String(value ?? ""), kind);
      made.dataset.label = columns[at]; // which a narrow page shows in place of the head
      line.append(made);
    });
  }
  return made;
}

// Shows what is new alone: else a selection, a list that is open or the focus would be lost every two seconds.
export function show(id, ...content) {
  const place = element(id);
  const next = make("div");
  next.append(...content);
  if (place.dataset.shown === next.innerHTML) return;
  place.dataset.shown = next.innerHTML;
  place.replaceChildren(...next.childNodes);
}

export async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { authorization: `Bearer ${token}`, ...options.headers } });
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    throw new Error(found.error?.message ?? `${path}: ${answer.status}`);
  }
  return answer;
}

export function copyButton(label, text) {
  const made = make("button", "", "copy");
  made.type = "button";
  made.title = "copy";
  made.append(make("span", label), make("code", text));
  made.dataset.copies = text;
  return made;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button[data-copies]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copies);
  const said = button.querySelector("span");
  const label = said.textContent;
  said.textContent = "copied";
  setTimeout(() => (said.textContent = label), 1500);
});

export const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "never");
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
export function size(bytes) {
  const many = Number(bytes) / 2 ** 30;
  if (many >= 1) return `${many.toFixed(many < 10 ? 1 : 0)} GiB`;
  return many >= 2 ** -10 ? `${Math.round(many * 2 ** 10)} MiB` : `${Math.round(many * 2 ** 20)} KiB`;
}
export const number = (value, digits = 1, unit = "") => (value === null ? "–" : `${value.toFixed(digits)}${unit}`);
export const words = (text) => text.replaceAll("_", " ");
export function span(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
export const age = (now, seconds) => (seconds ? `${span(Math.max(0, now - seconds))} ago` : "never");
