// Asks for the page's data, and hands it to what shows it.

import { showCharts } from "./charts.js";
import { models, ringsKnown, showChoice } from "./chat.js";
import { ask, element, make, show } from "./common.js";
import { showDoors, showJoin, showModels, showUsage } from "./lists.js";
import { onChoice, showMachines, takeTrace } from "./machines.js";
import { showAudit, showProofs, showShares } from "./proofs.js";

let cluster = null;
let load = { gateways: [], history: {} };
let doors = [];
let used = null;

// One sentence for all: what serves, and how fast.
function showState() {
  const serving = cluster.deployments.filter((one) => one.rings.some((ring) => ring.phase === "serving"));
  const broken = cluster.deployments.filter(
    (one) => one.rings.length && !serving.includes(one) && !one.rings.some((ring) => ring.slowest),
  );
  const online = cluster.nodes.filter((one) => one.state === "online").length;
  const rate = load.gateways.reduce((sum, one) => sum + (one.tokens_per_second ?? 0), 0);
  const names = (list) => list.map((one) => one.plan.spec.name).join(", ");
  const machines = online === 1 ? "one machine" : `${online} machines`;
  const said = [];
  if (serving.length) said.push(`${names(serving)} ${serving.length > 1 ? "serve" : "serves"}`);
  if (!serving.length && !broken.length) said.push("nothing serves");
  said.push(`${machines} online`);
  if (rate) said.push(`${rate.toFixed(1)} tokens/s`);
  const faults = broken.length ? [make("span", `${names(broken)} ${broken.length > 1 ? "do" : "does"} not serve`, "bad"), " · "] : [];
  show("state", ...faults, said.join(" · "));
  element("state").className = broken.length ? "bad" : serving.length ? "good" : "";
  element("name").textContent = cluster.roster.cluster;
}

function showCluster(found) {
  cluster = found;
  showProofs(found);
  showChoice(null, found.deployments);
  showMachines(found, load.gateways);
  showModels(found);
  showState();
  showDoors(doors, models(), cluster?.gateways ?? []);
}

function showLoad(found) {
  load = found;
  showCharts(found.history);
  const lost = found.gateways.filter((one) => one.trouble).map((one) => `${one.gateway}: ${one.trouble}`);
  tellTrouble("gateways", lost.join("; "));
}

async function showTraces() {
  for (const one of cluster?.deployments.flatMap((deployment) => deployment.rings) ?? []) {
    if (one.phase === "serving") takeTrace(one.ring, await traceOf(one.ring));
  }
  if (cluster) showMachines(cluster, load.gateways);
}

const today = () => new Date(Date.now() - new Date().getTimezoneOffset() * 6e4).toISOString().slice(0, 10);
const traceOf = async (ring) => (await ask(`/data/trace?ring=${encodeURIComponent(ring)}`)).json();
const failed = new Map();

function tellTrouble(path, text) {
  if (text) failed.set(path, text);
  else failed.delete(path);
  element("trouble").textContent = [...new Set(failed.values())].join("; ");
  element("trouble").hidden = !failed.size;
}

async function refresh(seconds, path, shown) {
  if (!document.hidden) {
    try {
      await shown(path ? await (await ask(path)).json() : null);
      tellTrouble(path, "");
    } catch (error) {
      if (path) tellTrouble(path, error.message);
    }
  }
  setTimeout(refresh, seconds * 1000, seconds, path, shown);
}

element("trace").addEventListener("click", async () => {
  element("trace").disabled = true;
  try {
    const members = [];
    for (const ring of new Set(ringsKnown().map((one) => one.ring))) members.push(...(await traceOf(ring)));
    showShares(members);
    tellTrouble("trace", "");
  } catch (error) {
    tellTrouble("trace", error.message);
  }
  element("trace").disabled = false;
});
onChoice(() => {
  if (cluster) showMachines(cluster, load.gateways);
  showCharts(load.history);
  if (used) showUsage(used, today());
});
if (!matchMedia("(min-width: 760px)").matches) element("addresses").open = false;

void refresh(2, "/data/cluster", showCluster);
void refresh(5, "/data/load", showLoad);
void refresh(5, "/data/rings", (found) => showChoice(found));
void refresh(4, "", showTraces);
void refresh(30, "/data/doors", (found) => {
  doors = found;
  showDoors(doors, models(), cluster?.gateways ?? []);
});
void refresh(10, "/data/join", showJoin);
void refresh(30, "/data/usage", (found) => {
  used = found;
  showUsage(found, today());
});
void refresh(30, "/data/audit", showAudit);
