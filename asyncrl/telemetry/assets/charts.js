"use strict";
// Small line and bar charts as SVG. All text goes in through textContent: what the model wrote is never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = [0, 1, 2, 3, 4, 5, 6, 7].map((number) => `var(--c${number})`);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value; else if (key === "style") node.style.cssText = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  const short = Number(value.toPrecision(size >= 1e3 && size < 1e4 ? 4 : 3));
  const [, unit, letter] = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]].find(([least]) => Math.abs(short) >= least);
  return Number((short / unit).toPrecision(4)) + letter;
}

// Percentages rounded to one decimal, so that the rounded numbers add up to 100.
function percents(values) {
  const add = (several) => several.reduce((sum, value) => sum + value, 0);
  const all = add(values), exact = values.map((value) => (all > 0 ? (1000 * value) / all : 0)), found = exact.map(Math.floor);
  const order = exact.map((_, i) => i).sort((a, b) => (exact[b] % 1) - (exact[a] % 1));
  if (all > 0) for (const i of order.slice(0, 1000 - add(found))) found[i] += 1;
  return found.map((tenths) => tenths / 10);
}

function percent(share) {
  const value = 100 * share;
  return (value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1)) + " %";
}

function seconds(value) {
  if (value < 1e-3) return (value * 1e6).toFixed(0) + " µs";
  if (value < 0.9995) return (value * 1e3).toPrecision(3) + " ms";
  if (value < 119.95) return value.toFixed(value < 10 ? 2 : 1) + " s";
  const whole = Math.round(value), minutes = Math.floor(whole / 60);
  if (minutes < 120) return minutes + " min " + (whole % 60) + " s";
  return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || rough;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function stepTicks(low, high, room) {
  if (high <= low) return [low];
  return ticks(low, high, Math.max(2, Math.floor(room / 62))).filter((value) => Number.isInteger(value));
}

function range(values) {
  const real = values.filter((value) => value !== null && Number.isFinite(value));
  if (!real.length) return null;
  let low = Math.min(...real), high = Math.max(...real);
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const pad = Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }
  if (low > 0 && low < 0.35 * high) low = 0;
  const pad = 0.06 * (high - low);
  return [low === 0 ? 0 : low - pad, high + pad];
}

function smooth(values) {
  const weight = 2 / (1 + Math.max(2, values.length / 30));
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
}

// Whether the differences of neighbours add up to more than four times the range. Then a long curve gets a smoothed one on top.
function noisy(values) {
  const way = values.slice(1).reduce((sum, value, i) => sum + Math.abs(value - values[i]), 0);
  return way > 4 * (Math.max(...values) - Math.min(...values));
}

function path(xs, ys, x, y) {
  let text = "";
  ys.forEach((value, i) => {
    if (value !== null && Number.isFinite(value)) text += (text ? "L" : "M") + x(xs[i]).toFixed(1) + " " + y(value).toFixed(1);
  });
  return text;
}

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}
function hideTip() { tip.style.display = "none"; }

function legend(items) {
  const box = el("div", { class: "legend" });
  for (const [label, colour] of items) box.append(el("span", {}, el("i", { style: "background:" + colour }), document.createTextNode(label)));
  return box;
}

function frame(width, height, left, xlabel) {
  const area = { left, right: width - 10, top: 10, bottom: height - 34 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  root.append(svg("text", { x: (area.left + area.right) / 2, y: height - 3, "text-anchor": "middle" }, xlabel));
  return [root, area];
}

function axes(root, area, xTicks, yTicks, x, y, yText) {
  for (const value of yTicks) {
    root.append(svg("line", { x1: area.left, x2: area.right, y1: y(value), y2: y(value), stroke: "var(--grid)" }));
    root.append(svg("text", { x: area.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, yText(value)));
  }
  root.append(svg("line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, stroke: "var(--axis)" }));
  for (const value of xTicks) {
    root.append(svg("line", { x1: x(value), x2: x(value), y1: area.bottom, y2: area.bottom + 4, stroke: "var(--axis)" }));
    root.append(svg("text", { x: x(value), y: area.bottom + 15, "text-anchor": "middle" }, String(value)));
  }
}

// One card. `lines`: [{label, values}], `band`: {label, low, high} drawn under the first line; `about`: what the numbers mean.
function lineChart(title, steps, lines, about, band) {
  const every = lines.flatMap((line) => line.values).concat(band ? band.low.concat(band.high) : []);
  const bounds = range(every);
  const card = el("div", { class: "card" });
  const last = [...lines[0].values].reverse().find((value) => value !== null);
  const head = el("h3", {}, el("span", { text: title }), el("span", { class: "now", text: number(last) }));
  const note = el("p", { class: "about", text: about, hidden: "" });
  head.onclick = () => note.toggleAttribute("hidden");
  card.append(head, note);
  if (!bounds) { card.append(el("p", { class: "empty", text: "No finite values." })); return card; }
  const [root, area] = frame(400, 208, 46, "policy version");
  const low = steps[0], high = steps[steps.length - 1];
  const x = (value) => (high === low ? (area.left + area.right) / 2 : area.left + ((value - low) / (high - low)) * (area.right - area.left));
  const y = (value) => area.bottom - ((value - bounds[0]) / (bounds[1] - bounds[0])) * (area.bottom - area.top);
  axes(root, area, stepTicks(low, high, area.right - area.left), ticks(bounds[0], bounds[1], 4), x, y, number);
  if (band) drawBand(root, steps, band, x, y);
  lines.forEach((line, index) => drawLine(root, steps, line.values, COLOURS[index % COLOURS.length], x, y));
  hover(root, area, steps, x, (i) => {
    const texts = lines.filter((line) => line.values[i] !== null).map((line) => `${line.label}  ${number(line.values[i])}`);
    if (band && band.low[i] !== null) texts.push(`${band.label}  ${number(band.low[i])} … ${number(band.high[i])}`);
    return `version ${steps[i]}\n` + (texts.join("\n") || "no value");
  });
  card.append(root);
  const items = lines.map((line, index) => [line.label, COLOURS[index % COLOURS.length]]);
  if (band) items.push([band.label, "var(--band)"]);
  if (items.length > 1) card.append(legend(items));
  return card;
}

function drawBand(root, steps, band, x, y) {
  const rows = steps.map((_, i) => i).filter((i) => band.low[i] !== null && band.high[i] !== null);
  if (rows.length < 2) return;
  const up = rows.map((i) => `${x(steps[i]).toFixed(1)} ${y(band.high[i]).toFixed(1)}`);
  const down = [...rows].reverse().map((i) => `${x(steps[i]).toFixed(1)} ${y(band.low[i]).toFixed(1)}`);
  root.append(svg("path", { d: "M" + up.concat(down).join("L") + "Z", fill: "var(--c0)", opacity: 0.13 }));
}

function drawLine(root, steps, values, colour, x, y) {
  const points = values.map((value, i) => [steps[i], value]).filter(([, value]) => value !== null);
  const many = points.length > 100 && noisy(points.map(([, value]) => value));
  root.append(svg("path", { d: path(steps, values, x, y), fill: "none", stroke: colour, "stroke-width": many ? 1 : 1.8, "stroke-linejoin": "round", opacity: many ? 0.3 : 1 }));
  if (many) root.append(svg("path", { d: path(steps, smooth(values), x, y), fill: "none", stroke: colour, "stroke-width": 2 }));
  if (points.length <= 40) for (const [step, value] of points) root.append(svg("circle", { cx: x(step), cy: y(value), r: points.length <= 12 ? 3 : 2, fill: colour }));
}

function hover(root, area, steps, x, text) {
  const line = svg("line", { y1: area.top, y2: area.bottom, stroke: "var(--faint)", "stroke-dasharray": "3 3", visibility: "hidden" });
  root.append(line);
  root.addEventListener("mousemove", (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * root.viewBox.baseVal.width;
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at)) best = i; });
    line.setAttribute("x1", x(steps[best])); line.setAttribute("x2", x(steps[best])); line.setAttribute("visibility", "visible");
    showTip(event, text(best));
  });
  root.addEventListener("mouseleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
}

// Stacked bars of shares (0..1), `room` pixels wide. `parts`: [{label, colour, values}] from the bottom up. Without room for a
// bar per step, a bar is the mean of several steps.
function stackedBars(steps, weights, parts, room) {
  const size = Math.ceil(steps.length / Math.min(130, room / 5));
  const bins = [];
  for (let from = 0; from < steps.length; from += size) bins.push([from, Math.min(steps.length, from + size)]);
  const [root, area] = frame(room, 300, 46, size > 1 ? `policy version (each bar: ${size} steps)` : "policy version");
  const pitch = (area.right - area.left) / bins.length;
  const gap = pitch > 14 ? Math.min(10, pitch * 0.18) : pitch > 4 ? 1 : 0;
  const width = Math.min(pitch - gap, 70);
  const y = (share) => area.bottom - share * (area.bottom - area.top);
  const centre = (i) => area.left + (i + 0.5) * pitch;
  axes(root, area, [], [0, 0.25, 0.5, 0.75, 1], null, y, (value) => 100 * value + " %");
  const every = Math.ceil((bins.length * 58) / room);
  bins.forEach(([from, to], i) => {
    if (i % every === 0) root.append(svg("text", { x: centre(i), y: area.bottom + 15, "text-anchor": "middle" }, String(steps[from])));
    const weight = weights.slice(from, to).reduce((a, b) => a + b, 0) || 1;
    let base = 0;
    const texts = [];
    for (const part of parts) {
      const share = part.values.slice(from, to).reduce((sum, value, k) => sum + (value || 0) * weights[from + k], 0) / weight;
      if (share <= 0) continue;
      root.append(svg("rect", { x: centre(i) - width / 2, width, y: y(base + share), height: Math.max(0, y(base) - y(base + share)), fill: part.colour }));
      base += share;
      texts.unshift(`${part.label}  ${percent(share)}`);
    }
    const zone = svg("rect", { x: centre(i) - pitch / 2, width: pitch, y: area.top, height: area.bottom - area.top, fill: "transparent" });
    const name = to - from > 1 ? `versions ${steps[from]} to ${steps[to - 1]}` : `version ${steps[from]}`;
    zone.addEventListener("mousemove", (event) => showTip(event, `${name}, ${seconds(weight)}\n${texts.join("\n")}`));
    zone.addEventListener("mouseleave", hideTip);
    root.append(zone);
  });
  return root;
}
