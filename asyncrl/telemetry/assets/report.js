// Fills the page from its data.
const KIND_COLOURS = {
  decode: "#2f6bdc", prefill: "#7fb0f7", train: "#1f9d63", logprobs: "#8fd3ae", publish: "#0e8fa3", evaluate: "#8a4fc0", checkpoint: "#8d6b2f",
};
const CAUSE_COLOURS = {
  handoff: "#f6dc85", loop: "#efb62f", start: "#cdd4de", reward: "#f07f2f", environment: "#c9541a", checkpoint: "#d3b98c",
  publish: "#9ad0d8", evaluate: "#cbb2ea", group: "#f2a3b3", slots: "#f7c9d8", requests: "#e6dbe8", unexplained: "var(--ink)",
};
const SPARE = ["#b9c6da", "#b7d1c6", "#d9cdb0", "#cdc0dc", "#dbc6c0", "#c5d2b4"];

function spare(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) % 9973;
  return SPARE[sum % SPARE.length];
}
function kindColour(kind) { return KIND_COLOURS[kind] || spare(kind); }
function causeColour(cause) { return CAUSE_COLOURS[cause] || "#d7a7c0"; }

const DATA = JSON.parse(document.getElementById("data").textContent);
const STEPS = DATA.steps, SERIES = DATA.series;
const byId = (id) => document.getElementById(id);
const used = new Set();
const filled = (name) => SERIES[name] && SERIES[name].some((value) => value !== null);
function take(name) { used.add(name); return SERIES[name]; }
function matching(pattern) { return Object.keys(SERIES).filter((name) => pattern.test(name) && !used.has(name) && filled(name)); }
function first(values) { return (values || []).find((value) => value !== null); }
function lastOf(values) { return [...(values || [])].reverse().find((value) => value !== null); }

function header() {
  document.title = DATA.name;
  byId("name").textContent = DATA.name;
  const badge = byId("result");
  badge.textContent = DATA.result || "no result recorded";
  if (!DATA.result) badge.classList.add("plain");
  else if (!/^(finished|ok|done|complete)/i.test(DATA.result)) badge.classList.add("bad");
  const day = (unix) => new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC";
  byId("when").textContent = DATA.started ? `${day(DATA.started)}, ${seconds(DATA.duration)}` : "";
  const fact = (label, value, note) => {
    const dd = el("dd", { text: value });
    if (note) dd.append(" ", el("small", { text: note }));
    byId("facts").append(el("div", {}, el("dt", { text: label }), dd));
  };
  for (const text of DATA.warnings) byId("warnings").append(el("p", { text }));
  fact("steps", String(DATA.trained), STEPS.length ? `to version ${STEPS[STEPS.length - 1]}` : "");
  if (filled("reward/mean")) fact("reward, last step", number(lastOf(SERIES["reward/mean"])), `first ${number(first(SERIES["reward/mean"]))}`);
  for (const name of Object.keys(SERIES).filter((key) => /^eval\/.*avg@/.test(key)).slice(0, 2)) fact(name, number(lastOf(SERIES[name])), `first ${number(first(SERIES[name]))}`);
  if (filled("perf/tokens_per_s")) fact("tokens/s, last step", number(lastOf(SERIES["perf/tokens_per_s"])));
  if (filled("staleness/max")) fact("staleness, largest", number(Math.max(...SERIES["staleness/max"].filter((v) => v !== null))));
  const total = DATA.account.all;
  if (total) {
    const all = percents(Object.values(total)), labels = Object.keys(total);
    const idle = all.filter((_, i) => labels[i].startsWith("idle/")).reduce((sum, share) => sum + share, 0);
    fact("idle", idle.toFixed(1) + " %", `unexplained ${(all[labels.indexOf("idle/unexplained")] || 0).toFixed(1)} %`);
  }
}

const unit = (name) => (DATA.about[name] || [""])[0];
function about(names) {
  const known = names.filter((name) => DATA.about[name]);
  return known.map((name) => `${name} (unit: ${unit(name)})\n${DATA.about[name][1]}\nA bad value: ${DATA.about[name][2]}`).join("\n\n");
}

// Groups of names that share one chart: the same unit (not "as logged"), and largest values that are 0 or within a factor of ten.
function alike(names) {
  const size = (name) => Math.max(...SERIES[name].map((value) => Math.abs(value || 0)));
  const together = (first, name) => unit(first) === unit(name) && unit(name) !== "as logged" && (!size(name) || 10 * size(name) >= size(first));
  const groups = [];
  for (const name of [...names].sort((a, b) => size(b) - size(a))) {
    const group = groups.find(([first]) => together(first, name));
    if (group) group.push(name); else groups.push([name]);
  }
  return groups.map((group) => group.sort()).sort(([a], [b]) => (a < b ? -1 : 1));
}

function band(lowName, highName, label) {
  return filled(lowName) && filled(highName) ? { label, low: take(lowName), high: take(highName) } : null;
}

function rewardBand() {
  if (!filled("reward/std")) return null;
  const mean = SERIES["reward/mean"], std = take("reward/std");
  const shifted = (sign) => mean.map((value, i) => (value === null || std[i] === null ? null : value + sign * std[i]));
  return { label: "mean ± std", low: shifted(-1), high: shifted(1) };
}

function curves() {
  const grid = byId("charts");
  const add = (title, lines, under) => {
    const present = lines.filter(([name]) => filled(name));
    if (!present.length) return;
    const drawn = present.map(([name, label]) => ({ label, values: take(name) }));
    grid.append(lineChart(title, STEPS, drawn, about(present.map(([name]) => name)), under && under()));
  };
  const all = (pattern, cut) => matching(pattern).map((name) => [name, name.slice(cut)]);
  const each = (names, alone, several, label) => {
    for (const group of alike(names)) {
      add(group.length > 1 ? `${several}, ${unit(group[0])}` : `${alone} ${label(group[0])}, ${unit(group[0])}`, group.slice(0, 8).map((name) => [name, label(name)]));
    }
  };
  add("Reward", [["reward/mean", "mean"]], rewardBand);
  const parts = matching(/^reward\/.+\/mean$/), scores = parts.filter((name) => unit(name) !== "as logged");
  if (scores.length === 1) used.add(scores[0]);
  each(parts.filter((name) => !used.has(name)), "Reward", "Reward by function", (name) => name.slice(7).replace(/\/mean$/, ""));
  each(matching(/^eval\//), "Held-out", "Held-out evaluation", (name) => name.slice(5));
  add("Loss", [["loss", "loss"]]);
  add("Gradient norm, before clipping", [["optim/grad_norm", "gradient norm"]]);
  add("Optimizer steps with a clipped gradient, share", [["optim/clipped", "share"]]);
  add("Entropy, nats per token", [["entropy", "entropy"]]);
  add("Staleness, versions", [["staleness/mean", "mean"], ["staleness/max", "max"]]);
  add("Completion length, tokens", [["completions/mean_length", "mean"]], () => band("completions/min_length", "completions/max_length", "shortest to longest"));
  add("Truncated completions, share", [["completions/clipped_ratio", "share"]]);
  add("Tokens per second", [["perf/tokens_per_s", "tokens/s"]]);
  add("KL(policy, reference), nats per token", [["kl", "policy, reference"]]);
  add("KL(sampler, trainer), nats per token", [["mismatch_kl/mean", "sampler, trainer"]]);
  add("Ratios clipped by the loss, share", all(/^clip_ratio\//, 11));
  add("Share of groups without a reward difference", [["frac_reward_zero_std", "share"]]);
  add("Learning rate", [["optim/lr", "learning rate"]]);
  add("Event loop lag, 99th percentile, ms", [["loop/lag_ms_p99", "lag"]]);
  if (!grid.children.length) grid.append(el("p", { class: "empty", text: "No metrics were recorded." }));
  const rest = matching(/^(?!idle\/|busy\/)/);
  const more = byId("more");
  more.querySelector("summary").textContent = `${rest.length} more metrics`;
  if (!rest.length) more.remove();
  // Draw these charts only when the section is opened, because there can be a thousand.
  more.addEventListener("toggle", () => {
    if (byId("more-charts").children.length) return;
    for (const name of rest) byId("more-charts").append(lineChart([name, unit(name)].filter((part) => part && part !== "none").join(", "), STEPS, [{ label: name, values: SERIES[name] }], about([name])));
  });
}

// The busy and idle shares of a lane. `at`: indices of the points that have shares of this lane.
function shareParts(lane, at) {
  const parts = [];
  for (const section of ["busy", "idle"]) {
    const prefix = prefixOf(section, lane);
    const names = Object.keys(SERIES).filter((name) => name.startsWith(prefix) && !name.slice(prefix.length).includes("/") && filled(name));
    names.sort((a, b) => sumOf(SERIES[b]) - sumOf(SERIES[a]));
    for (const name of names) {
      const label = name.slice(prefix.length);
      parts.push({ label: section === "idle" ? `idle: ${label}` : label, colour: section === "idle" ? causeColour(label) : kindColour(label), values: at.map((i) => SERIES[name][i]) });
    }
  }
  return parts.filter((part) => part.values.some((value) => value > 0));
}
function prefixOf(section, lane) { return lane === "all" ? section + "/" : `${section}/${lane}/`; }
function sumOf(values) { return values.reduce((sum, value) => sum + (value || 0), 0); }

function idle() {
  const box = byId("idle"), side = byId("idle-table"), lanes = Object.keys(DATA.account);
  if (!lanes.length) { box.append(el("p", { class: "empty", text: "No account of the time was recorded." })); side.remove(); return; }
  const chart = el("div");
  let lane = lanes[0];
  const draw = () => {
    const known = SERIES[prefixOf("idle", lane) + "unexplained"], at = STEPS.map((_, i) => i).filter((i) => known[i] !== null);
    const parts = shareParts(lane, at), pick = (values) => at.map((i) => values[i]);
    chart.replaceChildren(stackedBars(pick(STEPS), pick(DATA.weights), parts, Math.max(300, chart.clientWidth)), legend(parts.map((part) => [part.label, part.colour])));
    table(side, DATA.account[lane], lane);
  };
  if (lanes.length > 1) {
    const select = el("select", { "aria-label": "lane" });
    for (const each of lanes) select.append(el("option", { value: each, text: each === "all" ? "all lanes (mean)" : "lane " + each }));
    select.onchange = () => { lane = select.value; draw(); };
    box.append(el("div", { class: "bar" }, select));
  }
  box.append(chart);
  draw();
  addEventListener("resize", draw);
}

function table(side, account, lane) {
  const body = el("table", {}, el("tr", {}, el("th", { text: lane === "all" ? "The run" : "The run, lane " + lane }), el("th", { class: "n", text: "share" }), el("th", { class: "n", text: "time" })));
  const sorted = Object.entries(account).sort((a, b) => b[1] - a[1]), shares = percents(sorted.map(([, took]) => took));
  const rows = sorted.map(([label, took], i) => ({ label, took, share: shares[i] }));
  for (const section of ["busy", "idle"]) {
    const own = rows.filter(({ label }) => label.startsWith(section + "/"));
    const sum = (value) => own.reduce((total, row) => total + value(row), 0);
    body.append(line(section, sum((row) => row.share), sum((row) => row.took), null, "sum"));
    for (const { label, share, took } of own) {
      const name = label.slice(5);
      if (took > 0 || name === "unexplained") body.append(line(name, share, took, section === "idle" ? causeColour(name) : kindColour(name), "", about([label])));
    }
  }
  side.replaceChildren(body);
}

function line(label, share, took, colour, style, title) {
  const name = el("td", { title: title || "" });
  if (colour) name.append(el("i", { style: "background:" + colour }));
  name.append(label);
  return el("tr", { class: style }, name, el("td", { class: "n", text: share.toFixed(1) + " %" }), el("td", { class: "n", text: seconds(took) }));
}

function rollouts() {
  const box = byId("rollouts"), sets = DATA.rollouts;
  if (!sets.length) { box.append(el("p", { class: "empty", text: "No rollouts were written." })); return; }
  const list = el("div"), which = el("select", { "aria-label": "step" }), order = el("select", { "aria-label": "order" });
  which.append(el("option", { value: "all", text: "all sampled steps" }));
  for (const set of sets) which.append(el("option", { value: set.step, text: "version " + set.step }));
  for (const [value, text] of [["best", "best first"], ["worst", "worst first"]]) order.append(el("option", { value, text }));
  const draw = () => {
    list.replaceChildren();
    for (const set of sets) {
      if (which.value !== "all" && which.value !== String(set.step)) continue;
      list.append(el("div", { class: "step-title", text: `Version ${set.step}: ${set.rows.length} of ${set.total} trajectories` }));
      const sign = order.value === "best" ? -1 : 1;
      const rows = [...set.rows].sort((a, b) => sign * ((a.reward ?? -Infinity) - (b.reward ?? -Infinity)));
      for (const row of rows) list.append(rollout(row));
    }
  };
  which.onchange = order.onchange = draw;
  box.append(el("div", { class: "bar" }, which, order), list);
  draw();
}

function rollout(row) {
  const [low, high] = DATA.reward_range;
  const share = row.reward === null || row.reward === undefined || high <= low ? null : (row.reward - low) / (high - low);
  const colour = share === null ? "var(--axis)" : `hsl(${Math.round(10 + 130 * share)} 62% 45%)`;
  const meta = el("div", { class: "meta" }, el("span", {}, el("i", { class: "swatch", style: "background:" + colour }), el("b", { text: "reward " + number(row.reward) })));
  const say = (text) => meta.append(el("span", { text }));
  const parts = Object.entries(row.components || {});
  if (parts.length > 1) say(parts.map(([name, value]) => `${name} ${number(value)}`).join(", "));
  if (row.advantage !== undefined && row.advantage !== null) say("advantage " + number(row.advantage));
  say(`group ${row.group_id}, member ${row.member}`);
  if (row.versions) say(row.versions.min === row.versions.max ? `sampled by version ${row.versions.min}` : `sampled by versions ${row.versions.min} to ${row.versions.max}`);
  say(`${row.completion_length} tokens, ${row.finish_reason}`);
  return el("div", { class: "card rollout" }, meta, el("pre", { class: "prompt", text: row.prompt }), el("pre", { class: "completion", text: row.completion }));
}

function config() {
  if (DATA.config) { byId("config-text").textContent = DATA.config; return; }
  byId("config").remove();
  byId("config-link").remove();
}

header(); curves(); idle(); rollouts(); config();
