// node page.mjs < report.html: runs the page's own scripts over a document of plain objects, and prints what they draw, as JSON.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const page = readFileSync(0, "utf8");
const width = Number(process.argv[2] || 1280);

class Node_ {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, style: {}, text: "", listeners: {}, classList: { add() {} } }); }
  append(...nodes) { for (const node of nodes) this.children.push(typeof node === "string" ? Object.assign(new Node_("#text"), { text: node }) : node); }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  addEventListener(event, listener) { this.listeners[event] = listener; }
  querySelector(tag) { return this.find(tag)[0] || new Node_(tag); }
  remove() { this.removed = true; }
  get clientWidth() { return width; }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.text = text; this.children = []; }
  find(tag) { return this.children.flatMap((child) => [...(child.tag === tag ? [child] : []), ...child.find(tag)]); }
}

const named = {};
const script = (start) => page.slice(page.indexOf(start) + start.length, page.indexOf("</script>", page.indexOf(start)));
const document = {
  documentElement: new Node_("html"),
  getElementById: (id) => (named[id] ||= Object.assign(new Node_(id), id === "data" ? { text: script('id="data">') } : {})),
  createElement: (tag) => new Node_(tag),
  createElementNS: (_, tag) => new Node_(tag),
  createTextNode: (text) => Object.assign(new Node_("#text"), { text }),
};
vm.runInNewContext(script("<script>\n"), { document, addEventListener() {}, innerWidth: width, innerHeight: 900 });

const cards = (id) => document.getElementById(id).children.map((card) => ({
  title: card.find("h3")[0].children[0].textContent,
  about: card.find("p")[0].textContent,
  legend: card.find("span").slice(2).map((span) => span.textContent),
}));
const [bars] = named.idle.find("svg");
named.more.listeners.toggle?.();
console.log(JSON.stringify({
  charts: cards("charts"),
  more: cards("more-charts"),
  facts: named.facts.children.map((fact) => fact.children.map((part) => part.textContent)),
  warnings: document.getElementById("warnings").children.map((line) => line.textContent),
  bars: bars && { box: bars.attributes.viewBox, steps: bars.find("text").map((text) => text.textContent), tops: tops(bars) },
  table: named["idle-table"].find("tr").map((row) => row.children.map((cell) => cell.textContent)),
}));

function tops(chart) {
  const sums = {};
  for (const { attributes: box } of chart.find("rect")) if (box.fill !== "transparent") sums[box.x] = (sums[box.x] || 0) + Number(box.height);
  return Object.values(sums);
}
