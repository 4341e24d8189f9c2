"use strict";
// Every text is set as text, never as markup: names come from other machines.

const token = location.hash.slice(1) || sessionStorage.getItem("token") || "";
sessionStorage.setItem("token", token);
history.replaceState(null, "", location.pathname); // not into the history, nor into a picture of the window

const element = (id) => document.getElementById(id);
const names = new Map(); // of nodes, by id
let rings = null; // not known yet
let loadable = []; // models on demand, loaded or not
let root = "";
let gateways = [];

function make(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
}

function table(columns, rows) {
  const made = make("table");
  const head = made.createTHead().insertRow();
  for (const column of columns) head.append(make("th", column));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) {
      line.append(Array.isArray(cell) ? make("td", String(cell[0]), cell[1]) : make("td", String(cell ?? "")));
    }
  }
  return made;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { authorization: `Bearer ${token}`, ...options.headers } });
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    throw new Error(found.error?.message ?? `${path}: ${answer.status}`);
  }
  return answer;
}

const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "never");
const size = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
const number = (value, digits = 1, unit = "") => (value === null ? "–" : `${value.toFixed(digits)}${unit}`);
let levels = {};
const levelText = (level) => levels[level]?.shown ?? level;
const name = (id) => names.get(id) ?? (id.length > 40 ? id.slice(0, 16) : id);

function age(now, seconds) {
  if (!seconds) return "never";
  const passed = Math.max(0, now - seconds);
  if (passed < 120) return `${Math.round(passed)} s ago`;
  return passed < 7200 ? `${Math.round(passed / 60)} min ago` : `${Math.round(passed / 3600)} h ago`;
}

function showCluster(found) {
  names.clear();
  root = found.root;
  levels = found.levels;
  const legend = Object.entries(levels).slice(1).flatMap(([level, one]) => [make("span", one.shown, `edge ${level}`), `, ${one.words}; `]);
  element("levels").replaceChildren("A machine's edge shows its trust: ", ...legend, "red is no fault.");
  for (const one of [...found.nodes, ...found.gateways]) names.set(one.id, one.name);
  loadable = found.deployments.filter((one) => one.load).map((one) => one.plan.spec.name);
  const signers = found.roster.signers.map((one) => one.slice(0, 16)).join(", ");
  element("cluster").textContent =
    `cluster ${found.roster.cluster}, roster version ${found.roster.version}, signed by ${signers}, ` +
    `valid until ${moment(found.roster.expires)}, root ${found.root.slice(0, 16)}`;
  element("rings").replaceChildren(
    ...found.deployments.flatMap((one) => (one.rings.length ? one.rings.map((ring) => ringCard(one, ring)) : [loadCard(one)])),
  );
  if (!found.deployments.length) element("rings").replaceChildren(make("p", "Nothing is deployed: sealring deploy MODEL"));
  element("nodes").replaceChildren(
    table(
      ["node", "state", "trust", "attested", "challenged", "memory", "prompts on disk", "version", ""],
      found.nodes.map((one) => [
        one.name,
        [one.state, one.state],
        one.listed ? levelText(one.trust) : "not in the roster",
        age(found.now, one.attested_at),
        age(found.now, one.challenged_at),
        `${size(one.heartbeat.memory_used)} of ${size(one.heartbeat.memory_usable)}`,
        `${size(one.heartbeat.stored_bytes)}${one.heartbeat.stored_broken ? ", takes no writes" : ""}`,
        one.software_version,
        [one.trouble || one.idle, "text"],
      ]),
    ),
  );
  showModels();
  element("gateways").replaceChildren(
    table(
      ["gateway", "state", "enrolled", ""],
      found.gateways.map((one) => {
        const state = one.watching ? "connected" : "offline";
        return [one.name, [state, state], moment(one.enrolled), [one.trouble, "text"]];
      }),
    ),
  );
}

// A deployment without a ring: its model is on demand, and not loaded.
function loadCard(deployment) {
  const card = make("div", "", "ring");
  const load = deployment.load ?? { phase: "down", reason: "", waiting: 0 };
  card.append(make("strong", `${deployment.plan.spec.name} `), make("span", words(load.phase), "down"), ...loadLines(load));
  return card;
}

const words = (phase) => phase.replace("_", " ");

// What is to happen to a model on demand.
function loadLines(load) {
  const lines = [];
  if (load.reason) lines.push(load.reason);
  if (load.phase === "yielding") lines.push("it is unloaded once its requests are answered");
  else if (load.expires) lines.push(`it is unloaded at ${moment(load.expires)} if nobody asks`);
  if (load.waiting) lines.push(`${load.waiting} requests wait for it`);
  return lines.map((one) => make("div", one, "small"));
}

function ringCard(deployment, ring) {
  const card = make("div", "", "ring");
  const title = make("strong", `${deployment.plan.spec.name} `);
  const epoch = ring.phase === "serving" ? `epoch ${ring.epoch}` : ring.reason || "";
  const planned = deployment.plan.rings.find((one) => one.ring === ring.ring);
  const tensor = deployment.plan.spec.clear_links && !planned?.pipeline;
  const links = [...new Set(ring.links.map((one) => one.suite))].join(", ") +
    (tensor ? "; WHAT LAYERS ADD UP IS IN CLEAR" : "");
  const slowest = ring.progress.reduce((least, one) => (one.fraction < least.fraction ? one : least), ring.progress[0]);
  const phase = slowest ? `${ring.phase}, ${slowest.what} ${Math.floor(100 * slowest.fraction)} %` : ring.phase;
  card.append(title, make("span", phase, ring.phase), make("span", ` ${epoch} `));
  card.append(make("div", `ring ${ring.ring}${links ? `, links ${links}` : ""}`, "small"));
  const source = planned?.stages.flatMap((one) => one.residents).find((one) => one.guesses);
  const guessing = source ? [`${source.model || source.name} guesses`] : [];
  if (ring.drafted) guessing.push(`${ring.accepted} of ${ring.drafted} guessed tokens right`);
  if (guessing.length) card.append(make("div", guessing.join(", "), "small"));
  if (deployment.load) card.append(...loadLines(deployment.load));
  if (ring.phase === "serving" && ring.reason) card.append(make("div", `last change: ${ring.reason}`, "small"));
  const stages = make("div", "", "stages");
  for (const stage of planned?.stages ?? []) {
    const box = make("div", "", `stage ${stage.trust}`);
    box.append(make("strong", stage.member_name));
    const part = tensor ? `1/${planned.stages.length} of each of ` : "";
    box.append(make("div", `${part}layers ${stage.first_layer} to ${stage.end_layer - 1}`));
    box.append(make("div", `trust ${levelText(stage.trust)}, ${size(stage.weight_bytes)}`, "small"));
    stages.append(box);
  }
  card.append(stages);
  return card;
}

function showLoad(found) {
  gateways = [...new Set(found.map((one) => one.gateway))];
  showPrograms();
  element("load").replaceChildren(
    table(
      ["gateway", "model", "rows", "waiting", "tokens/s", "first token, median", "KV memory", "prefixes kept", "of prompts from prefixes", "read from disk"],
      found.map((one) => (one.trouble ? [one.gateway, [one.trouble, "text"]] : [
        one.gateway,
        one.model,
        one.running,
        one.waiting,
        number(one.tokens_per_second),
        number(one.first_token, 3, " s"),
        number(100 * one.kv_usage, 0, " %"),
        `${one.prefix_tokens} tokens`,
        ...[one.prefix_share, one.disk_share].map((share) => (share === null ? "–" : number(100 * share, 0, " %"))),
      ])),
    ),
  );
}

function showAudit(found) {
  element("chain").textContent = found.trouble
    ? `THE LOG DOES NOT HOLD: ${found.trouble}`
    : `${found.count} entries, one chain, checked here`;
  element("chain").className = found.trouble ? "down" : "";
  element("audit").replaceChildren(
    table(
      ["", "at", "who", "action", "subject", "details"],
      found.entries.map((one) => [
        one.sequence,
        moment(one.at),
        name(one.actor),
        one.action,
        name(one.subject),
        [Object.entries(one.details).map(([key, value]) => `${key}=${value}`).join(" "), "text"],
      ]),
    ),
  );
}

function showShares(members) {
  const activities = Object.keys(members.find((one) => !one.trouble) ?? {}).filter((one) => !["rank", "name", "idle"].includes(one));
  element("shares").replaceChildren(
    table(
      ["member", ...activities.map((one) => one.replaceAll("_", " ")), "idle"],
      members.map((one) =>
        one.trouble ? [one.name, [one.trouble, "text"]] : [one.name, ...activities.map((of) => number(one[of])), number(one.idle)],
      ),
    ),
  );
}

function showRings(found) {
  rings = found;
  showModels();
}

const models = () => [...new Set([...rings.map((one) => one.deployment), ...loadable])]; // what serves comes first

function showModels() {
  if (!rings) return;
  const shown = models();
  const before = [...element("model").options].map((one) => one.value);
  if (shown.join(" ") !== before.join(" ")) { // else a list that is open would close
    const chosen = element("model").value;
    element("model").replaceChildren(...shown.map((one) => new Option(one, one, false, one === chosen)));
  }
  showPrograms();
  showSeers();
}

const PROXY = "http://127.0.0.1:8081";

// What somebody types or enters elsewhere, each with a button that copies it.
function showPrograms() {
  if (!rings) return;
  const named = gateways.map((one) => ` --gateway ${one}`).join("");
  const lines = [
    ["Start the proxy", `sealring proxy${named} --root-sha256 ${root}`],
    ["Set up a tool", "sealring connect claude --write"],
    ["Base URL of OpenAI clients", `${PROXY}/v1`],
    ["of Anthropic's and Ollama's", PROXY],
    ...models().map((one) => ["Model", one]),
  ];
  const told = lines.map((one) => one.join(" ")).join("\n");
  if (element("programs").dataset.told === told) return; // else a selection would be lost every two seconds
  element("programs").dataset.told = told;
  element("programs").replaceChildren(
    ...lines.map(([label, text]) => {
      const line = make("p");
      const copy = make("button", "Copy");
      copy.type = "button";
      copy.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
        setTimeout(() => (copy.textContent = "Copy"), 1500);
      });
      line.append(make("span", label, "small"), make("code", text), copy);
      return line;
    }),
  );
}

function showSeers() {
  if (!rings) return;
  const serving = rings.filter((one) => one.deployment === element("model").value);
  element("seers").replaceChildren();
  if (!serving.length && loadable.includes(element("model").value)) {
    element("seers").append(make("div", "The model is loaded for the question. It is sealed for the ring that serves it then.", "small"));
  }
  for (const ring of serving) {
    const members = ring.members.map((one) => `${name(one.id)} of trust ${levelText(one.level)}`);
    if (ring.clear_links) {
      element("seers").append(make("div", `Ring ${ring.ring} computes over links in clear: it gets no sealed prompt, and so none from here.`, "down"));
      continue;
    }
    element("seers").append(
      make("div", `The prompt is sealed for ${members[0]}, the head of ring ${ring.ring}: it reads prompt and answer.`),
      make("div", `The ring's other members compute on it: ${members.slice(1).join(", ") || "none"}. Minimum trust: ${levelText(ring.min_trust)}. The gateway cannot read it.`, "small"),
    );
  }
}

const shown = { "/data/cluster": showCluster, "/data/load": showLoad, "/data/audit": showAudit, "/data/rings": showRings };
const failed = new Map();

function tellTrouble(path, text) {
  if (text) failed.set(path, text);
  else failed.delete(path);
  element("trouble").textContent = [...new Set(failed.values())].join("; ");
  element("trouble").hidden = !failed.size;
}

async function refresh(path, seconds) {
  if (!document.hidden) {
    try {
      shown[path](await (await ask(path)).json());
      tellTrouble(path, "");
    } catch (error) {
      tellTrouble(path, error.message);
    }
  }
  setTimeout(refresh, seconds * 1000, path, seconds);
}

let messages = [];
let answering = null;

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LARGEST = 8 * 1024 * 1024; // bytes of a picture that the gateway takes
let pictures = []; // data URLs, to be shown with the next question

function thumbnail(picture, name = "a picture") {
  const made = make("img");
  made.src = picture; // a data URL: the page may load no other
  made.alt = name;
  return made;
}

async function addPictures(files) {
  for (const file of files) {
    if (!KINDS.includes(file.type) || file.size > LARGEST) {
      const why = file.size > LARGEST ? "is larger than 8 MiB" : "is no PNG, JPEG, WebP or GIF";
      element("talk").append(make("div", `${file.name} ${why}`, "down"));
      continue;
    }
    const picture = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => fail(reader.error);
      reader.readAsDataURL(file);
    });
    pictures.push(picture);
    const shown = thumbnail(picture, file.name);
    shown.addEventListener("click", () => {
      const at = pictures.indexOf(picture);
      if (at >= 0) pictures.splice(at, 1);
      shown.remove();
    });
    element("pictures").append(shown);
  }
}

function takePictures() {
  const taken = pictures;
  pictures = [];
  element("pictures").replaceChildren();
  return taken;
}

async function chat(question, shown) {
  const parts = shown.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text: question }] : question });
  const said = make("p", question, "user");
  if (shown.length) said.prepend(...shown.map((picture) => thumbnail(picture)), make("br"));
  element("talk").append(said);
  const line = element("talk").appendChild(make("p"));
  answering = new AbortController();
  element("stop").hidden = false;
  element("send").disabled = true;
  try {
    const answer = await ask("/v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: element("model").value, messages, stream: true }),
    });
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      line.textContent += event.choices?.[0]?.delta?.content ?? "";
    }
    const ring = answer.headers.get("x-sealring-ring");
    if (!rings?.some((one) => one.ring === ring)) showRings(await (await ask("/data/rings")).json());
    const trust = rings.find((one) => one.ring === ring)?.min_trust;
    element("talk").append(make("div", `answered by ring ${ring}, minimum trust ${levelText(trust)}`, "small"));
  } catch (error) {
    if (error.name !== "AbortError") element("talk").append(make("div", error.message, "down"));
  }
  messages.push({ role: "assistant", content: line.textContent });
  answering = null;
  element("stop").hidden = true;
  element("send").disabled = false;
}

// Server-sent events (HTML Living Standard, section 9.2), as far as the APIs here send them: one data line each.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

element("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = element("question").value.trim();
  if (!question || answering) return;
  element("question").value = "";
  void chat(question, takePictures());
});
element("picture").addEventListener("click", () => element("files").click());
element("files").addEventListener("change", async () => {
  await addPictures([...element("files").files]);
  element("files").value = ""; // so that the same file can be chosen again
});
element("chat").addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
element("chat").addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault(); // else the browser would open the file
  void addPictures([...event.dataTransfer.files]);
});
element("question").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.types.includes("text/plain")) return; // a text, with a picture of it
  event.preventDefault();
  void addPictures(files);
});
element("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // an input method's Enter is its own
  event.preventDefault();
  element("chat").requestSubmit();
});
element("stop").addEventListener("click", () => answering?.abort());
element("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  takePictures();
  element("talk").replaceChildren();
});
element("model").addEventListener("change", showSeers);
element("trace").addEventListener("click", async () => {
  element("trace").disabled = true;
  try {
    const members = [];
    for (const ring of new Set((rings ?? []).map((one) => one.ring))) {
      members.push(...(await (await ask(`/data/trace?ring=${encodeURIComponent(ring)}`)).json()));
    }
    showShares(members);
    tellTrouble("trace", "");
  } catch (error) {
    tellTrouble("trace", error.message);
  }
  element("trace").disabled = false;
});

void refresh("/data/cluster", 2);
void refresh("/data/load", 2);
void refresh("/data/rings", 5);
void refresh("/data/audit", 30);
