// Models, the join code, addresses and usage.

import { dayBars } from "./charts.js";
import { clock, copyButton, element, make, show, size, span, table, words } from "./common.js";

// Bytes of what takes long, their rate and the time that the rest takes, all as the nodes say it.
function pace(one, total) {
  if (!Number(total)) return "";
  const left = Number(one.rate) ? `, ${size(one.rate)}/s, ${span(Number(one.seconds_left))} left` : "";
  return `${size(one.done)} of ${size(total)}${left}`;
}

function entry(name, state, kind, notes, progress) {
  const made = make("div", "", "shelf");
  const from = name.lastIndexOf("/") + 1; // behind whose it is on the hub
  if (from) notes = [name.slice(0, from - 1), ...notes];
  made.append(make("strong", name.slice(from)), make("span", state, `mark ${kind}`));
  if (progress !== undefined) {
    const bar = make("progress");
    bar.value = progress;
    bar.setAttribute("aria-label", `${name}: ${state}`);
    made.append(bar);
  }
  if (notes.some(Boolean)) made.append(make("div", notes.filter(Boolean).join(" · "), "small"));
  return made;
}

function servedEntry(deployment, down) {
  const name = deployment.plan.spec.name;
  const serving = deployment.rings.filter((one) => one.phase === "serving");
  const load = deployment.load;
  const notes = [];
  if (load?.waiting) notes.push(`${load.waiting} requests wait for it`);
  if (load?.phase === "yielding") notes.push("it is unloaded once its requests are answered");
  else if (load?.expires) notes.push(`it is unloaded at ${clock(load.expires)} if nobody asks`);
  if (load?.reason) notes.push(load.reason);
  const guessed = serving.reduce((sum, one) => sum + Number(one.drafted), 0);
  if (guessed) notes.push(`${serving.reduce((sum, one) => sum + Number(one.accepted), 0).toLocaleString()} of ${guessed.toLocaleString()} guessed tokens were right`);
  const forming = deployment.rings.find((one) => one.slowest);
  if (forming) {
    const { what, fraction, member, total } = forming.slowest;
    const told = pace(forming.slowest, total);
    const of = forming.progress.length > 1 ? `, on ${member}` : "";
    const share = fraction ? ` ${Math.floor(100 * fraction)} %` : "";
    return entry(name, `${words(what)}${share}`, "", [told && `${told}${of}`, ...notes], fraction);
  }
  if (serving.length) {
    const rings = serving.length > 1 ? `serves, ${serving.length} rings` : "serves";
    return entry(name, rings, "good", notes);
  }
  if (load && !deployment.rings.length) return entry(name, words(load.phase), "", notes);
  const broken = deployment.rings.find((one) => one.reason);
  const bad = down || broken;
  return entry(name, bad ? "does not serve" : words(deployment.rings[0]?.phase ?? "is planned"), bad ? "bad" : "", [...notes, broken?.reason]);
}

// Models on disks that nothing serves, and whether they fit into the memory that is free.
function heldEntries(found) {
  const served = new Set(found.deployments.flatMap((one) => [one.plan.spec.model, one.plan.spec.draft]));
  const held = new Map();
  for (const node of found.nodes) {
    for (const one of node.heartbeat.models) {
      if (!served.has(one.name)) held.set(one.name, [...(held.get(one.name) ?? []), { node, one }]);
    }
  }
  return [...held].map(([name, places]) => {
    const whole = places.find(({ one }) => Number(one.size) && Number(one.done) >= Number(one.size));
    const problem = places.find(({ one }) => one.problem);
    const where = places.map(({ node }) => node.name).join(", ");
    if (!whole && problem) return entry(name, "does not come", "bad", [`${problem.node.name}: ${problem.one.problem}`]);
    if (!whole) {
      const { node, one } = places.find((each) => each.one.coming) ?? places[0];
      const fraction = Number(one.size) ? Number(one.done) / Number(one.size) : 0;
      const has = `${node.name} has ${pace(one, one.size) || "nothing yet"}`;
      return one.coming ? entry(name, "is fetched", "", [has], fraction) : entry(name, "in parts", "", [has]);
    }
    const lacks = found.lacking[name];
    const fits = lacks ? `lacks about ${size(lacks)}` : "would fit now";
    return entry(name, fits, "", [`${size(whole.one.size)} on ${where}`]);
  });
}

export function showModels(found) {
  const away = new Set(found.nodes.filter((one) => one.state === "offline").map((one) => one.id));
  const misses = (one) => one.plan.rings.some((ring) => ring.stages.some((stage) => away.has(stage.member)));
  const entries = [...found.deployments.map((one) => servedEntry(one, misses(one))), ...heldEntries(found)];
  if (!found.deployments.length) {
    const line = make("p", "Nothing is deployed yet. ", "small");
    line.append(copyButton("copy", "sealring deploy MODEL"));
    entries.unshift(line);
  }
  show("shelf", ...entries);
}

export function showJoin(found) {
  if (!found.code) {
    const said = found.trouble ? `The join code is made and seen on ${found.at}:` : "There is no join code now. On the first machine:";
    show("code", make("p", said, "small"), copyButton("copy", "sealring token code --uses 4"));
    return;
  }
  const left = Math.max(1, Math.ceil((found.expires - Date.now() / 1000) / 60));
  const machines = found.uses === 1 ? "one more machine" : `${found.uses} more machines`;
  const told = make("p", `Good for ${machines} and ${left} ${left === 1 ? "minute" : "minutes"}. The machine asks for it after`, "small");
  show("code", make("strong", found.code), told, copyButton("copy", "sealring join"));
}

export function showDoors(doors, models, gateways) {
  const lines = doors.flatMap((one, at) => (at ? [["Another door", `${one}/v1`]] : [["OpenAI", `${one}/v1`], ["Anthropic, Ollama", one]]));
  if (!doors.length) lines.push(["No door is open on this machine; to open one", "sealring proxy"]);
  lines.push(...gateways.flatMap((one) => one.lan.map((at) => ["The LAN door is open; phones and laptops, with its key", `https://${at}/v1`])));
  const which = models.length > 1 ? ` --model ${models[0]}` : "";
  lines.push(...models.slice(0, 4).map((one) => ["Model", one]), ["Set up a tool", `sealring connect claude --write${which}`]);
  show("doors", ...lines.map(([label, text]) => copyButton(label, text)));
}

export function showUsage(found, today) {
  const quotas = new Map(found.quotas.map((one) => [one.key, one]));
  element("since").textContent = found.trouble ? `incomplete: ${found.trouble}` : "the last 30 days";
  if (!found.keys.length) {
    show("days", make("p", "Nothing was used yet.", "small"));
    show("keys");
    return;
  }
  show("days", dayBars(found.days, found.since, today));
  show(
    "keys",
    table(
      ["key", "model", "requests", "prompt", "cached", "answered", "ring time", "quota of today"],
      found.keys.map((one) => {
        const quota = quotas.get(one.key);
        const spent = quota ? `${Number(quota.tokens_today).toLocaleString()} of ${Number(quota.tokens_a_day).toLocaleString()}` : "";
        return [
          one.label || one.key || "no key",
          one.model || "other",
          ...[one.requests, one.prompt_tokens, one.cached_tokens, one.answered_tokens].map(Number),
          [span(one.ring_ms / 1000), "number"],
          [spent, "number"],
        ];
      }),
    ),
  );
}
