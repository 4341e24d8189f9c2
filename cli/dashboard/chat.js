// The chat. Its prompts are sealed by the process that serves this page.

import { ask, element, make, number, show } from "./common.js";
import { levelText, nameOf } from "./proofs.js";

let rings = null; // not known yet
let loadable = []; // models on demand, loaded or not
let messages = [];
let answering = null;
const LEAST = 150; // milliseconds: what came at once was not computed at once

export const ringsKnown = () => rings ?? [];
export const models = () => [...new Set([...ringsKnown().map((one) => one.deployment), ...loadable])]; // what serves comes first

export function showChoice(newRings, deployments) {
  rings = newRings ?? rings;
  if (deployments) loadable = deployments.filter((one) => one.load).map((one) => one.plan.spec.name);
  if (!rings) return;
  const shown = models();
  const before = [...element("model").options].map((one) => one.value);
  if (shown.join("\n") !== before.join("\n")) {
    const chosen = element("model").value;
    element("model").replaceChildren(...shown.map((one) => new Option(one, one, false, one === chosen)));
  }
  showSeers();
}

function showSeers() {
  const model = element("model").value;
  const serving = rings.filter((one) => one.deployment === model);
  const lines = [];
  if (!serving.length && loadable.includes(model)) {
    lines.push(make("p", "The model is loaded for the question. It is sealed for the ring that serves it then.", "small"));
  }
  for (const ring of serving) {
    if (ring.clear_links) {
      lines.push(make("p", `Ring ${ring.ring} computes over links in clear: it gets no sealed prompt, and so none from here.`, "bad"));
      continue;
    }
    const members = ring.members.map((one) => `${nameOf(one.id)} of trust ${levelText(one.level)}`);
    lines.push(
      make("p", `The prompt is sealed for ${members[0]}, the head of ring ${ring.ring}: it reads prompt and answer.`, "small"),
      make("p", `The ring's other members compute on it: ${members.slice(1).join(", ") || "none"}. Minimum trust: ${levelText(ring.min_trust)}. The gateway cannot read it.`, "small"),
    );
  }
  const head = serving.find((one) => !one.clear_links)?.members[0];
  element("reader").textContent = head ? `Sealed for ${nameOf(head.id)}: who sees it` : "Who sees it";
  show("seers", ...lines);
}

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LARGEST = 8 * 1024 * 1024; // bytes of a picture that the gateway takes
let pictures = []; // data URLs, to be shown with the next question

function thumbnail(picture, name = "a picture") {
  const made = make("img");
  made.src = picture; // a data URL: the page may load no other
  made.alt = name;
  return made;
}

function say(text, kind) {
  const made = element("talk").appendChild(make("div", text, kind));
  element("talk").scrollTop = element("talk").scrollHeight;
  return made;
}

async function addPictures(files) {
  for (const file of files) {
    if (!KINDS.includes(file.type) || file.size > LARGEST) {
      say(`${file.name} ${file.size > LARGEST ? "is larger than 8 MiB" : "is no PNG, JPEG, WebP or GIF"}`, "bad");
      continue;
    }
    const picture = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => fail(reader.error);
      reader.readAsDataURL(file);
    });
    pictures.push(picture);
    const shown = make("button");
    shown.type = "button";
    shown.title = "take it out";
    shown.append(thumbnail(picture, file.name));
    shown.addEventListener("click", () => {
      pictures = pictures.filter((one) => one !== picture);
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

// How an answer came: tokens, rate, first token and who computed it.
async function footer(ringName, usage, sent, first, last) {
  if (!rings?.some((one) => one.ring === ringName)) showChoice(await (await ask("/data/rings")).json());
  const ring = rings.find((one) => one.ring === ringName);
  const tokens = usage?.completion_tokens ?? 0;
  const told = [`${tokens.toLocaleString()} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && last - first > LEAST) told.push(`${number(((tokens - 1) * 1000) / (last - first))} tokens/s`);
  if (first) told.push(`first after ${number((first - sent) / 1000, 2)} s`);
  const members = ring?.members.map((one) => nameOf(one.id)).join(", ") ?? "members that are gone";
  return `${told.join(" · ")} · computed by ${members} (ring ${ringName}, minimum trust ${levelText(ring?.min_trust)})`;
}

async function chat(question, shown) {
  const parts = shown.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text: question }] : question });
  const said = make("p", question, "user");
  if (shown.length) said.prepend(...shown.map((picture) => thumbnail(picture)), make("br"));
  const line = make("p", "", "answer");
  element("talk").append(said, line);
  answering = new AbortController();
  element("stop").hidden = false;
  element("send").disabled = true;
  const sent = performance.now();
  let [first, last, usage] = [0, 0, null];
  try {
    const answer = await ask("/v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: element("model").value, messages, stream: true, stream_options: { include_usage: true } }),
    });
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.reasoning) {
        last = performance.now();
        first ||= last;
      }
      const follows = element("talk").scrollTop + element("talk").clientHeight > element("talk").scrollHeight - 40;
      line.textContent += delta.content ?? "";
      if (follows) element("talk").scrollTop = element("talk").scrollHeight;
    }
    say(await footer(answer.headers.get("x-sealring-ring"), usage, sent, first, last), "small");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "bad");
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
element("picture-button").addEventListener("click", () => element("files").click());
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
