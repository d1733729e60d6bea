// Puts the page together from the data that lies in it.
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
  fact("steps", String(STEPS.length), STEPS.length ? `to version ${STEPS[STEPS.length - 1]}` : "");
  if (filled("reward/mean")) fact("reward, last step", number(lastOf(SERIES["reward/mean"])), `first ${number(first(SERIES["reward/mean"]))}`);
  for (const name of Object.keys(SERIES).filter((key) => /^eval\/.*avg@/.test(key)).slice(0, 2)) fact(name, number(lastOf(SERIES[name])), `first ${number(first(SERIES[name]))}`);
  if (filled("perf/tokens_per_s")) fact("tokens/s, last step", number(lastOf(SERIES["perf/tokens_per_s"])));
  if (filled("staleness/max")) fact("staleness, largest", number(Math.max(...SERIES["staleness/max"].filter((v) => v !== null))));
  const total = DATA.account.all;
  if (total) {
    const idle = Object.entries(total).filter(([label]) => label.startsWith("idle/")).reduce((sum, [, share]) => sum + share, 0);
    fact("idle", percent(idle), `unexplained ${percent(total["idle/unexplained"] || 0)}`);
  }
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
    const present = lines.filter(([name]) => filled(name)).map(([name, label]) => ({ label, values: take(name) }));
    if (present.length) grid.append(lineChart(title, STEPS, present, under && under()));
  };
  const all = (pattern, cut) => matching(pattern).map((name) => [name, name.slice(cut)]);
  add("Reward", [["reward/mean", "mean"]], rewardBand);
  const parts = all(/^reward\/.+\/mean$/, 7).map(([name, label]) => [name, label.replace(/\/mean$/, "")]);
  if (parts.length > 1) add("Reward by function", parts.slice(0, 8)); else parts.forEach(([name]) => used.add(name));
  add("Held-out evaluation", all(/^eval\//, 5).slice(0, 8));
  add("Loss", [["loss", "loss"]]);
  add("Gradient norm, before clipping", [["optim/grad_norm", "gradient norm"]]);
  add("Entropy, nats per token", [["entropy", "entropy"]]);
  add("Staleness, steps", [["staleness/mean", "mean"], ["staleness/max", "max"]]);
  add("Completion length, tokens", [["completions/mean_length", "mean"]], () => band("completions/min_length", "completions/max_length", "shortest to longest"));
  add("Tokens per second", [["perf/tokens_per_s", "tokens/s"]]);
  add("KL", [["kl", "to the reference"], ["mismatch_kl/mean", "sampler to trainer"]]);
  add("Clipped share of tokens", all(/^clip_ratio\//, 11));
  add("Share of groups without a reward difference", [["frac_reward_zero_std", "share"]]);
  add("Learning rate", [["optim/lr", "learning rate"]]);
  add("Event loop lag, 99th percentile, ms", [["loop/lag_ms_p99", "lag"]]);
  if (!grid.children.length) grid.append(el("p", { class: "empty", text: "No metrics were recorded." }));
  const rest = matching(/^(?!idle\/|busy\/)/);
  const more = byId("more");
  more.querySelector("summary").textContent = `${rest.length} more metrics`;
  if (!rest.length) more.remove();
  // Drawn when they are asked for: there can be a hundred of them.
  more.addEventListener("toggle", () => {
    if (byId("more-charts").children.length) return;
    for (const name of rest) byId("more-charts").append(lineChart(name, STEPS, [{ label: name, values: SERIES[name] }]));
  });
}

function shareParts(lane) {
  const order = ["busy", "idle"], parts = [];
  for (const section of order) {
    const prefix = lane === "all" ? section + "/" : `${section}/${lane}/`;
    const names = Object.keys(SERIES).filter((name) => name.startsWith(prefix) && !name.slice(prefix.length).includes("/") && filled(name));
    names.sort((a, b) => lastOfSum(SERIES[b]) - lastOfSum(SERIES[a]));
    for (const name of names) {
      const label = name.slice(prefix.length);
      parts.push({ label: section === "idle" ? `idle: ${label}` : label, colour: section === "idle" ? causeColour(label) : kindColour(label), values: SERIES[name], key: `${section}/${label}` });
    }
  }
  return parts.filter((part) => part.values.some((value) => value > 0));
}
function lastOfSum(values) { return values.reduce((sum, value) => sum + (value || 0), 0); }

function idle() {
  const box = byId("idle"), side = byId("idle-table"), lanes = Object.keys(DATA.account);
  if (!lanes.length) { box.append(el("p", { class: "empty", text: "No account of the time was recorded." })); side.remove(); return; }
  const chart = el("div");
  const draw = (lane) => {
    const parts = shareParts(lane);
    chart.replaceChildren(stackedBars(STEPS, DATA.weights, parts, 130), legend(parts.map((part) => [part.label, part.colour])));
    table(side, DATA.account[lane], lane);
  };
  if (lanes.length > 1) {
    const select = el("select", { "aria-label": "lane" });
    for (const lane of lanes) select.append(el("option", { value: lane, text: lane === "all" ? "all lanes (mean)" : "lane " + lane }));
    select.onchange = () => draw(select.value);
    box.append(el("div", { class: "bar" }, select));
  }
  box.append(chart);
  draw(lanes[0]);
}

function table(side, account, lane) {
  const body = el("table", {}, el("tr", {}, el("th", { text: lane === "all" ? "The run" : "The run, lane " + lane }), el("th", { class: "n", text: "share" }), el("th", { class: "n", text: "time" })));
  const sorted = Object.entries(account).sort((a, b) => b[1] - a[1]);
  for (const section of ["busy", "idle"]) {
    const rows = sorted.filter(([label]) => label.startsWith(section + "/"));
    const sum = rows.reduce((total, [, share]) => total + share, 0);
    body.append(line(section, sum, null, "sum"));
    for (const [label, share] of rows) {
      const name = label.slice(5);
      if (share > 0 || name === "unexplained") body.append(line(name, share, section === "idle" ? causeColour(name) : kindColour(name)));
    }
  }
  side.replaceChildren(body);
}

function line(label, share, colour, style) {
  const name = el("td", {});
  if (colour) name.append(el("i", { style: "background:" + colour }));
  name.append(label);
  return el("tr", { class: style || "" }, name, el("td", { class: "n", text: percent(share) }), el("td", { class: "n", text: seconds(share * DATA.trained_s) }));
}

function timeline() {
  const box = byId("timeline"), data = DATA.timeline;
  if (!data || !data.rows.length) { byId("timeline-lead").textContent = ""; box.append(el("p", { class: "empty", text: "No trace was recorded." })); return; }
  byId("timeline-lead").textContent = data.lead;
  for (const row of data.rows) for (const span of row.spans) span[3] = span[3].startsWith("idle/") ? causeColour(span[3].slice(5)) : kindColour(span[3]);
  drawTimeline(box, data);
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
  const colour = share === null ? "#c5ccd6" : `hsl(${Math.round(10 + 130 * share)} 62% 45%)`;
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

header(); curves(); idle(); timeline(); rollouts(); config();
