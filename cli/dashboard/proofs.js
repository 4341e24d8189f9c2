// What the page can prove, and how: signatures, attestations, the audit chain, and the members' own traces.

import { age, element, moment, number, show, table, words } from "./common.js";

let levels = {};
const names = new Map(); // of members, by id
export const levelText = (level) => levels[level]?.shown ?? level;
export const nameOf = (id) => names.get(id) ?? (id.length > 40 ? id.slice(0, 16) : id);

export function showProofs(found) {
  levels = found.levels;
  for (const one of [...found.nodes, ...found.gateways]) names.set(one.id, one.name);
  const { roster } = found;
  element("root").textContent = found.root;
  element("holds").textContent = `roster ${roster.version}, signed and verified here`;
  element("roster").textContent =
    `Cluster ${roster.cluster}, roster version ${roster.version} (${roster.hash}), signed by ${roster.signers.join(", ")}. ` +
    `It is signed anew every few minutes; without that it would hold until ${moment(roster.expires)}. Root key ${found.root}.`;
  element("levels").textContent = Object.values(levels).slice(1).map((one) => `${one.shown}: ${one.words}`).join("; ");
  show(
    "attested",
    table(
      ["machine", "trust", "attested", "challenged", "key", "software"],
      found.nodes.map((one) => [
        one.name,
        one.listed ? levelText(one.trust) : "not in the roster",
        age(found.now, one.attested_at),
        age(found.now, one.challenged_at),
        one.key_type ?? "",
        one.manifest.slice(0, 16),
      ]),
    ),
  );
  const rings = found.deployments.flatMap((one) => one.rings.map((ring) => [one, ring]));
  show(
    "rings",
    table(
      ["model", "ring", "phase", "epoch", "links", "last change"],
      rings.map(([one, ring]) => {
        const plan = one.plan.rings.find((each) => each.ring === ring.ring);
        const suites = [...new Set(ring.links.map((link) => link.suite))].join(", ");
        const clear = one.plan.spec.clear_links && !plan?.pipeline ? "; what layers add up is in clear" : "";
        return [one.plan.spec.name, ring.ring, words(ring.phase), String(ring.epoch), suites + clear, ring.reason];
      }),
    ),
  );
  show(
    "gateways",
    table(
      ["gateway", "state", "enrolled", ""],
      found.gateways.map((one) => [one.name, one.watching ? ["connected", "good"] : ["offline", "soft"], moment(one.enrolled), one.trouble]),
    ),
  );
}

export function showAudit(found) {
  element("chain").textContent = found.trouble ? `The log does not hold: ${found.trouble}` : `${found.count} entries, one chain, checked here`;
  element("chain").className = found.trouble ? "bad" : "small";
  show(
    "audit",
    table(
      ["", "at", "who", "action", "subject", "details"],
      found.entries.map((one) => [
        String(one.sequence),
        moment(one.at),
        nameOf(one.actor),
        words(one.action),
        nameOf(one.subject),
        Object.entries(one.details).map(([key, value]) => `${key}=${value}`).join(" "),
      ]),
    ),
  );
}

export function showShares(members) {
  const activities = Object.keys(members.find((one) => !one.trouble) ?? {}).filter((one) => !["rank", "name", "idle"].includes(one));
  const rows = members.map((one) =>
    one.trouble ? [one.name, one.trouble] : [one.name, ...activities.map((of) => number(one[of])), number(one.idle)],
  );
  show("shares", table(["member", ...activities.map(words), "idle"], rows));
}
