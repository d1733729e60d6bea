// The timeline: one canvas, rows of spans, the wheel zooms, dragging moves.
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

function drawTimeline(box, data) {
  const ROW = 19, TOP = 24;
  let LABEL = 150;
  const height = TOP + data.rows.length * ROW + 8;
  const canvas = el("canvas", { height });
  canvas.style.height = height + "px";
  const full = [data.start, data.end];
  let view = [...full];
  const reset = el("button", { text: "Whole window" });
  const zoomIn = el("button", { text: "Zoom in" });
  const zoomOut = el("button", { text: "Zoom out" });
  box.append(el("div", { class: "bar" }, zoomIn, zoomOut, reset, el("span", { text: "Wheel zooms, dragging moves, hovering names a span." })));
  box.append(canvas);

  const px = () => canvas.clientWidth - LABEL - 4;
  const toX = (t) => LABEL + ((t - view[0]) / (view[1] - view[0])) * px();
  const toT = (x) => view[0] + ((x - LABEL) / px()) * (view[1] - view[0]);

  function rows(ctx) {
    data.rows.forEach((row, r) => {
      const y = TOP + r * ROW;
      for (const [start, duration, name, colour] of row.spans) {
        const a = toX(start), b = toX(start + duration);
        if (b < LABEL || a > LABEL + px()) continue;
        const left = Math.max(a, LABEL), width = Math.max(Math.min(b, LABEL + px()) - left, 0.7);
        ctx.fillStyle = colour;
        ctx.fillRect(left, y + 2, width, ROW - 4);
        if (width > 46) {
          ctx.save();
          ctx.beginPath(); ctx.rect(left, y, width - 4, ROW); ctx.clip();
          ctx.fillStyle = light(colour) ? "#28303c" : "#ffffff";
          ctx.fillText(data.names[name], left + 5, y + 13.5);
          ctx.restore();
        }
      }
    });
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

  function draw() {
    LABEL = canvas.clientWidth < 600 ? 96 : 150;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11.5px system-ui, 'Liberation Sans', sans-serif";
    data.rows.forEach((row, r) => {
      if (r % 2 === 0) { ctx.fillStyle = css("--ground"); ctx.fillRect(0, TOP + r * ROW, canvas.clientWidth, ROW); }
      ctx.fillStyle = css("--ink");
      let name = row.name;
      while (name.length > 3 && ctx.measureText(name).width > LABEL - 12) name = name.slice(0, -2) + "…";
      ctx.fillText(name, 2, TOP + r * ROW + 13.5);
    });
    ctx.fillStyle = css("--soft");
    for (const t of ticks((view[0] - full[0]) / 1e6, (view[1] - full[0]) / 1e6, Math.max(2, px() / 110))) {
      const x = toX(t * 1e6 + full[0]);
      if (x < LABEL - 1) continue;
      ctx.fillStyle = css("--line"); ctx.fillRect(x, TOP - 6, 1, height - TOP);
      const text = "+" + (t === 0 ? "0 s" : seconds(t));
      ctx.fillStyle = css("--soft");
      if (x + 3 + ctx.measureText(text).width <= LABEL + px()) ctx.fillText(text, x + 3, 12);
    }
    rows(ctx);
    let free = LABEL;
    ctx.strokeStyle = ctx.fillStyle = css("--ink");
    for (const [t, step] of data.steps) {
      const x = toX(t), text = "version " + step, left = x - 4 - ctx.measureText(text).width;
      if (x < LABEL || x > LABEL + px()) continue;
      ctx.setLineDash([4, 3]); ctx.beginPath(); ctx.moveTo(x, TOP - 8); ctx.lineTo(x, height); ctx.stroke(); ctx.setLineDash([]);
      if (left >= free) { ctx.fillText(text, left, 22); free = x; }
    }
  }

  function setView(a, b) {
    const least = 1e-6 * (full[1] - full[0]), length = Math.min(Math.max(b - a, least), full[1] - full[0]);
    const start = Math.min(Math.max(a, full[0]), full[1] - length);
    view = [start, start + length];
    requestAnimationFrame(draw);
  }
  function zoom(factor, at) { setView(at - (at - view[0]) * factor, at + (view[1] - at) * factor); }
  reset.onclick = () => setView(...full);
  zoomIn.onclick = () => zoom(0.5, (view[0] + view[1]) / 2);
  zoomOut.onclick = () => zoom(2, (view[0] + view[1]) / 2);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, toT(event.offsetX));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, ...view]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = ((drag[0] - event.clientX) / px()) * (drag[2] - drag[1]);
      setView(drag[1] + shift, drag[2] + shift);
      return;
    }
    const row = data.rows[Math.floor((event.offsetY - TOP) / ROW)];
    const t = toT(event.offsetX), slack = (1.5 / px()) * (view[1] - view[0]);
    const hit = row && event.offsetX >= LABEL && row.spans.filter(([s, d]) => s - slack <= t && t <= s + d + slack).sort((a, b) => a[1] - b[1])[0];
    if (hit) showTip(event, `${row.name}\n${data.names[hit[2]]}  ${seconds(hit[1] / 1e6)}${hit[4] ? "\n" + hit[4] : ""}`); else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

function light(colour) {
  const value = parseInt(colour.slice(1), 16);
  return 0.3 * (value >> 16) + 0.59 * ((value >> 8) & 255) + 0.11 * (value & 255) > 150;
}
