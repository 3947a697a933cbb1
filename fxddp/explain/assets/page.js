"use strict";
// Draws the report that stands in the page as JSON; see Note [schema] in fxddp/explain/report.py. No library, no network.

const root = document.documentElement;
window.addEventListener("error", (event) => {
  root.dataset.errors = `${root.dataset.errors || ""}${event.message}\n`;
  const line = document.createElement("div");
  line.className = "error";
  line.textContent = `This page could not be drawn: ${event.message}`;
  document.body.prepend(line);
});

const report = JSON.parse(document.getElementById("report").textContent);
const buckets = report.graphs.flatMap((graph) => graph.buckets);
const order = new Map(); // by graph and bucket: when it is launched among all
[...report.graphs].reverse().forEach((graph) => graph.buckets.forEach((b) => order.set(`${b.graph}.${b.index}`, order.size)));

// --- small things ---------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const space = "http://www.w3.org/2000/svg";
  const drawn = ["svg", "rect", "text", "line", "g", "clipPath", "defs"].includes(tag);
  const element = drawn ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.setAttribute("class", value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const digits = (value, n) => Number(value.toPrecision(n)).toString();

const mib = (value) => (typeof value === "string" ? value : `${digits(value, 4)} MiB`);
const sized = (settings) => {
  const several = settings.bucket_cap_mb_list || [], bytes = buckets.map((b) => b.nbytes);
  if (several.length) return `buckets of ${several.map((each) => digits(each, 4)).join(", ")} MiB`;
  if (typeof settings.bucket_mb !== "string") return `buckets of ${mib(settings.bucket_mb)}, the first of ${mib(settings.first_bucket_mb)}`;
  const between = [...new Set([size(Math.min(...bytes)), size(Math.max(...bytes))])].join(" to ");
  return `${bytes.length ? `buckets of ${between}, chosen by ` : ""}bucket_mb="auto"`;
};

const sent = (bytes) => (2 * (network.world_size - 1) * bytes) / network.world_size; // by each rank

function size(bytes) {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= factor) return `${digits(bytes / factor, 4)} ${unit}`;
  return `${bytes} B`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  seconds = Number(seconds.toPrecision(3));
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (seconds >= factor) return `${digits(seconds / factor, 3)} ${unit}`;
  return seconds ? `${Math.round(seconds * 1e9)} ns` : "0";
}

const percent = (share) => `${Math.round(share * 100)} %`;
const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const line = (source) => (source ? `${source.file.split("/").pop()}:${source.line}` : "");

function hue(graph, bucket) {
  const place = order.get(`${graph}.${bucket}`);
  const share = order.size > 1 ? place / (order.size - 1) : 0;
  return `oklch(var(--light) var(--chroma) ${(262 - 232 * share).toFixed(1)})`;
}

// --- head -----------------------------------------------------------------------------------------

const network = report.network;
const end = (spans) => Math.max(0, ...spans.map((span) => span.end));
const lasting = (spans) => sum(spans.map((span) => span.end - span.start));
const computing = (spans) => lasting(spans.filter((span) => span.lane === "compute" && span.kind !== "wait"));
const awaited = (b) => (b.needed === null || b.needed === undefined ? "backward" : b.needed < 0 ? "forward's end" : `forward ${b.needed}`);
const late = buckets.some((b) => awaited(b) !== "backward");

function head() {
  $("title").textContent = network ? `${report.model} on ${plural(network.world_size, "rank")}` : report.model;
  const settings = report.settings;
  $("subtitle").textContent =
    `${plural(report.graphs.length, "compiled graph")} · ${sized(settings)} · ` +
    `${report.device} · fxddp ${report.versions.fxddp}, torch ${report.versions.torch}`;
  const spans = report.timeline;
  const step = end(spans), computed = computing(spans);
  const sending = lasting(spans.filter((s) => s.lane === "network"));
  const bytes = sum(buckets.map((b) => b.nbytes)), travelling = sum(buckets.map((b) => b.wire_bytes));
  const tiles = [["seconds", step, duration(step), late ? "a step, from a backward through the next forward" : "a step, forward and backward"], ["computing", computed, duration(computed), "of computation"]];
  if (network) {
    const exposed = step - computed;
    tiles.push(["exposed", exposed, duration(exposed), "of exposed sending", exposed > 0.05 * step ? "bad" : ""]);
    if (sending) tiles.push(["overlap", 1 - exposed / sending, percent(1 - exposed / sending), `of ${duration(sending)} of sending is hidden`]);
    tiles.push(["sent", sent(travelling), size(sent(travelling)), "sent by each rank"]);
  }
  tiles.push(["nbytes", bytes, size(bytes), `of gradients in ${plural(buckets.length, "bucket")}`]);
  if (settings.codec) tiles.push(["wire_bytes", travelling, size(travelling), `after compression by ${settings.codec}`]);
  $("figures").append(
    ...tiles.map(([name, value, shown, what, kind]) =>
      make("div", { class: `tile ${kind || ""}`, "data-figure": name, "data-value": value }, make("b", {}, shown), make("span", {}, what))));
  $("advice").append(...report.advice.map((text) => make("li", {}, text)), ...report.notes.map((text) => make("li", { class: "note" }, text)));
}

// --- timeline -------------------------------------------------------------------------------------

const HEIGHT = 160, LEFT = 76, ROW = 46, GAP = 12, TOP = 26;

function timeline(spans, box) {
  const total = end(spans) || 1, waits = spans.filter((s) => s.kind === "wait");
  let from = 0, to = total * 1.01;
  const names = new Map(buckets.map((b) => [`${b.graph}.${b.index}`, b]));
  const pieces = new Map(report.graphs.flatMap((g) => g.pieces.map((p) => [`${g.index}.${p.index}`, p])));

  function about(span) {
    const when = `${duration(span.end - span.start)}, from ${duration(span.start)} to ${duration(span.end)}`;
    if (span.graph < 0) return [span.kind === "wait" ? "wait for what no graph packs" : "all-reduce of what no graph packs", when];
    if (span.kind === "bucket" || span.kind === "wait") {
      const b = names.get(`${span.graph}.${span.index}`);
      const list = b.gradients.slice(0, 6).map((g) => g.name).join(", ") + (b.gradients.length > 6 ? `, … (${b.gradients.length} in all)` : "");
      const exposed = lasting(waits.filter((s) => s.graph === span.graph && s.index === span.index));
      return [span.kind === "wait" ? `wait for bucket ${b.index}` : `bucket ${b.index}: ${b.route}`, when, `${size(b.nbytes)} of ${b.dtype}${b.wire_bytes === b.nbytes ? "" : `, ${size(b.wire_bytes)} travel`}`,
        span.kind === "bucket" ? `waited for ${duration(exposed)}${late ? `, by the ${awaited(b)}` : ""}` : "", list];
    }
    if (span.kind === "piece") {
      const p = pieces.get(`${span.graph}.${span.index}`);
      return [`piece ${span.index} of the backward of graph ${span.graph}`, when, `${plural(p.nodes, "node")}, ${digits(p.flops / 1e9, 3)} GFLOP, ${size(p.moved)} moved`,
        p.measured === null ? "predicted" : `measured; predicted ${duration(p.predicted)}`];
    }
    return [`${late ? `piece ${span.index} of the ` : ""}forward of graph ${span.graph}`, when];
  }

  function draw() {
    const width = Math.max(box.clientWidth, 320), inner = width - LEFT - 10;
    const x = (time) => LEFT + ((time - from) / (to - from)) * inner;
    const clip = (value) => Math.min(Math.max(value, LEFT), LEFT + inner);
    const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": "when everything happens in a step" });
    const least = (to - from) / Math.min(9, inner / 64); // seconds between ticks, so that labels do not touch
    const ten = 10 ** Math.floor(Math.log10(least)), step = ten * [1, 2, 5, 10].find((m) => ten * m >= least);
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const anchor = x(time) + 26 > width ? "end" : "middle";
      svg.append(make("line", { x1: x(time), x2: x(time), y1: TOP - 6, y2: HEIGHT - 22, stroke: "var(--line)" }));
      svg.append(make("text", { x: anchor === "end" ? width : x(time), y: HEIGHT - 8, "text-anchor": anchor }, time < step / 2 ? "0" : duration(time)));
    }
    for (const [start, stop] of runs(waits)) {
      const a = clip(x(start)), b = clip(x(stop));
      svg.append(make("rect", { x: a, y: TOP - 6, width: Math.max(0, b - a), height: HEIGHT - 16 - TOP, fill: "var(--badwash)" }));
      const anchor = b - a > 110 ? "middle" : "end";
      if (b - a > 14) svg.append(make("text", { x: anchor === "end" ? b : (a + b) / 2, y: TOP - 11, "text-anchor": anchor, style: "fill: var(--bad)" }, `exposed ${duration(stop - start)}`));
    }
    ["compute", "network"].forEach((lane, row) => {
      const y = TOP + row * (ROW + GAP);
      svg.append(make("text", { class: "label", x: 0, y: y + ROW / 2 + 4 }, lane));
      let last = -1;
      for (const span of spans.filter((s) => s.lane === lane)) {
        const a = clip(x(span.start)), b = clip(x(span.end));
        if (b <= LEFT || a >= LEFT + inner || (b - last < 0.4 && b - a < 0.4)) continue; // too narrow to be seen
        last = b;
        const fill = span.kind === "bucket" ? hue(span.graph, span.index) : { forward: "var(--forward)", piece: "var(--compute)", wait: "var(--badwash)", uncovered: "var(--off)" }[span.kind];
        const gap = b - a > 3 ? 1 : 0;
        svg.append(make("rect", { class: "span", x: a, y, width: Math.max(b - a - gap, 0.6), height: ROW, rx: b - a > 8 ? 4 : 0, fill,
          "data-kind": span.kind, "data-graph": span.graph, "data-index": span.index,
          onpointermove: (event) => tip(event, about(span)), onpointerleave: hide }));
        const text = span.kind === "forward" ? `forward${late ? ` ${span.index}` : ""}` : span.kind === "uncovered" ? "uncovered" : `${span.kind} ${span.index}`;
        const short = b - a > text.length * 6.6 + 8 ? text : b - a > String(span.index).length * 7 + 6 && ["bucket", "piece", ...(late ? ["forward"] : [])].includes(span.kind) ? String(span.index) : "";
        if (short) svg.append(make("text", { class: span.kind === "bucket" ? "onbucket" : "inside", x: (a + b) / 2, y: y + ROW / 2 + 4, "text-anchor": "middle" }, short));
      }
    });
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = from + ((event.offsetX - LEFT) / inner) * (to - from), factor = Math.exp(event.deltaY * 0.0015);
      move(at - (at - from) * factor, at + (to - at) * factor);
    }, { passive: false });
    svg.addEventListener("dblclick", () => move(0, total * 1.01));
    svg.addEventListener("pointerdown", (event) => {
      let before = event.clientX;
      const drag = (moved) => { const by = ((before - moved.clientX) / inner) * (to - from); before = moved.clientX; move(from + by, to + by); };
      window.addEventListener("pointermove", drag);
      window.addEventListener("pointerup", () => window.removeEventListener("pointermove", drag), { once: true });
    });
    box.replaceChildren(svg);
  }

  function move(a, b) {
    const least = total / 1e4, most = total * 1.01;
    const length = Math.min(Math.max(b - a, least), most);
    from = Math.min(Math.max(a, 0), most - length);
    to = from + length;
    hide();
    draw();
  }
  return draw;
}

function runs(spans) { // those that follow each other as one
  const found = [];
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    const before = found.at(-1);
    if (before && span.start <= before[1] * (1 + 1e-9)) before[1] = Math.max(before[1], span.end);
    else found.push([span.start, span.end]);
  }
  return found;
}

function tip(event, lines) {
  const box = $("tip");
  box.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).filter(Boolean).map((text) => make("div", {}, text)));
  box.hidden = false;
  const x = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8);
  const y = event.clientY + 18 + box.offsetHeight > window.innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18;
  box.style.left = `${x}px`;
  box.style.top = `${y}px`;
}
const hide = () => { $("tip").hidden = true; };

function timelines() {
  const views = [["predicted", report.timeline], ["recorded", report.recorded]].filter(([, spans]) => spans.length);
  let draw = () => {};
  const show = (spans, button) => {
    document.querySelectorAll("#which button").forEach((each) => each.setAttribute("aria-pressed", each === button));
    draw = timeline(spans, $("timeline"));
    draw();
  };
  const measured = report.graphs.some((graph) => graph.measured !== null);
  views.forEach(([name, spans]) => {
    const title = name === "predicted" && measured ? "measured computation, predicted sending" : name;
    const button = make("button", { type: "button", onclick: () => show(spans, button) }, title);
    $("which").append(button);
    if (name === "predicted" || views.length === 1) show(spans, button);
  });
  window.addEventListener("resize", () => draw());
}

// --- buckets --------------------------------------------------------------------------------------

const ROWS = 200;
const last = (bucket) => bucket.gradients.reduce((a, b) => (b.ready > a.ready ? b : a));
const TOLD = { "awaited by": (b) => awaited(b) !== "backward", measured: (b) => b.measured !== null, travel: (b) => b.wire_bytes !== b.nbytes, by: (b) => b.route !== "all-reduce" }; // columns that are not always worth their place
const COLUMNS = [
  ["bucket", (b) => order.get(`${b.graph}.${b.index}`), (b) => [make("span", { class: "key", style: `background: ${hue(b.graph, b.index)}` }), report.graphs.length > 1 ? `${b.graph}.${b.index}` : b.index], ""],
  ["bytes", (b) => b.nbytes, (b) => size(b.nbytes), "n"],
  ["travel", (b) => b.wire_bytes, (b) => size(b.wire_bytes), "n"],
  ["dtype", (b) => b.dtype, (b) => b.dtype, ""],
  ["after", (b) => b.piece, (b) => `piece ${b.piece}`, "short"],
  ["ready at", (b) => last(b).before, (b) => percent(last(b).before), "n"],
  ["sent in", (b) => b.predicted ?? -1, (b) => duration(b.predicted), "n"],
  ["exposed", (b) => b.exposed ?? -1, (b) => make("span", { class: b.exposed ? "bad" : "" }, duration(b.exposed)), "n"],
  ["awaited by", (b) => b.needed ?? -2, awaited, "short"],
  ["measured", (b) => b.measured ?? -1, (b) => duration(b.measured), "n"],
  ["by", (b) => b.route, (b) => b.route, "by"],
  ["parameters", (b) => b.gradients.length, (b) => [make("span", { class: "mono one", title: b.gradients.slice(0, 20).map((g) => g.name).join("\n") }, b.gradients[0].name), make("span", { class: "soft" }, b.gradients.length > 1 ? `and ${b.gradients.length - 1} more` : "")], "half"],
  ["waits for", (b) => last(b).name, (b) => [make("span", { class: "mono one" }, last(b).name), make("span", { class: "src mono one", title: last(b).source ? last(b).source.text : "" }, `${line(last(b).source)}  ${last(b).source ? last(b).source.text : last(b).node}`)], "wide"],
].filter(([name]) => !(name in TOLD) || buckets.some(TOLD[name]));

function bucketTable() {
  let column = 0, rising = true, wanted = "", limit = ROWS;
  const texts = new Map(buckets.map((b) => [b, [b.dtype, ...b.gradients.flatMap((g) => [g.name, line(g.source)])].join(" ").toLowerCase()]));
  const draw = () => {
    const value = COLUMNS[column][1];
    const rows = buckets.filter((b) => texts.get(b).includes(wanted)).sort((a, b) => {
      const p = value(a), q = value(b);
      return (p < q ? -1 : p > q ? 1 : order.get(`${a.graph}.${a.index}`) - order.get(`${b.graph}.${b.index}`)) * (rising ? 1 : -1);
    });
    const heads = COLUMNS.map(([name, , , kind], i) => {
      const head = make("th", { class: kind, scope: "col", onclick: () => { rising = i === column ? !rising : i === 0; column = i; draw(); } }, name);
      if (i === column) head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      return head;
    });
    const body = make("tbody", {});
    for (const b of rows.slice(0, limit)) {
      const row = make("tr", { class: "row", "data-bucket": `${b.graph}.${b.index}`, "data-bytes": b.nbytes, "data-predicted": b.predicted, "data-exposed": b.exposed, "data-count": b.gradients.length },
        COLUMNS.map(([, , cell, kind]) => make("td", { class: kind }, cell(b))));
      row.addEventListener("click", () => {
        if (row.nextSibling && row.nextSibling.dataset.of) row.nextSibling.remove();
        else row.after(make("tr", { "data-of": "1" }, make("td", { colspan: COLUMNS.length }, gradients(b))));
      });
      body.append(row);
    }
    const table = $("buckets");
    table.replaceChildren(make("thead", {}, make("tr", {}, heads)), body);
    table.parentNode.querySelectorAll(".more").forEach((each) => each.remove());
    if (rows.length > limit) table.after(make("button", { class: "more", onclick: () => { limit = Infinity; draw(); } }, `show all ${rows.length}`));
    if (!rows.length) body.append(make("tr", {}, make("td", { colspan: COLUMNS.length, class: "soft" }, buckets.length ? "no bucket has that" : "no gradients of parameters")));
  };
  $("filter").addEventListener("input", (event) => { wanted = event.target.value.toLowerCase(); draw(); });
  draw();
}

function gradients(bucket) {
  const rows = bucket.gradients.map((g) => make("tr", {}, make("td", { class: "mono" }, g.name), make("td", { class: "mono soft" }, `[${g.shape.join(", ")}]`), make("td", { class: "n" }, size(g.nbytes)),
    make("td", { class: "n" }, percent(g.before)), make("td", { class: "mono soft" }, line(g.source)), make("td", { class: "mono soft" }, g.node)));
  return make("table", { class: "inner" }, make("tbody", {}, rows));
}

// --- modules --------------------------------------------------------------------------------------

const STATES = { eager: ["var(--bad)", "outside of the graphs"], "left out": ["var(--bad)", "without a gradient that can be packed"], unknown: ["var(--off)", "in no graph so far"], unused: ["var(--off)", "unused"], frozen: ["var(--off)", "frozen"] };
const colour = (p) => (p.state === "bucket" ? hue(p.graph, p.bucket) : STATES[p.state][0]);

function tree() {
  const top = { children: new Map(), parameters: [] };
  for (const p of report.parameters) {
    let at = top;
    const parts = p.name.split(".");
    for (const part of parts.slice(0, -1)) {
      if (!at.children.has(part)) at.children.set(part, { children: new Map(), parameters: [] });
      at = at.children.get(part);
      at.parameters.push(p);
    }
    at.children.set(`${parts.at(-1)}\u0000`, { leaf: p, parameters: [p], children: new Map() });
  }
  return top;
}

const BINS = 300; // parts of a bar; where there are more, it shows what is at so many places

function sampled(runs, total) {
  const found = [];
  let at = 0, before = 0;
  for (let i = 0; i < BINS; i++) {
    while (at < runs.length - 1 && before + runs[at].nbytes <= ((i + 0.5) / BINS) * total) before += runs[at++].nbytes;
    found.push({ ...runs[at], share: 1 / BINS });
  }
  return found;
}

function bar(parameters) {
  const total = sum(parameters.map((p) => p.nbytes)) || 1, runs = [];
  for (const p of parameters) {
    const fill = colour(p), before = runs.at(-1);
    if (before && before.fill === fill) before.nbytes += p.nbytes;
    else runs.push({ fill, nbytes: p.nbytes, what: p.state === "bucket" ? `bucket ${report.graphs.length > 1 ? `${p.graph}.` : ""}${p.bucket}` : STATES[p.state][1] });
  }
  return make("span", { class: "bar" }, (runs.length > BINS ? sampled(runs, total) : runs).map((run) => make("i", { style: `width: ${100 * (run.share ?? run.nbytes / total)}%; background: ${run.fill}`, title: `${run.what}: ${size(run.nbytes)}` })));
}

function rows(node, depth = 0) {
  return [...node.children].slice(0, 500).map(([name, child]) => {
    const bytes = size(sum(child.parameters.map((p) => p.nbytes)));
    if (child.leaf) return make("div", { class: "leaf", "data-parameter": child.leaf.name }, make("span", { class: "name mono", title: child.leaf.name, style: `padding-left: ${14 * depth + 14}px` }, name.slice(0, -1)), bar([child.leaf]), make("span", { class: "bytes" }, bytes));
    const box = make("details", { class: "module" }, make("summary", {}, make("span", { class: "name mono", "data-name": name, style: `padding-left: ${14 * depth}px` }, name), bar(child.parameters), make("span", { class: "bytes" }, bytes)));
    box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(...rows(child, depth + 1)); });
    return box;
  });
}

function modules() {
  const top = tree();
  $("modules").append(...rows(top));
  const open = [...$("modules").children].filter((each) => each.tagName === "DETAILS");
  const within = (each) => top.children.get(each.querySelector(".name").dataset.name);
  for (const each of open) { // as deep as a page holds
    const child = within(each);
    if (child && child.children.size <= 24 && open.length <= 8 && [...child.children.values()].some((c) => !c.leaf)) each.open = true;
  }
  if (!report.parameters.length) $("modules").append(make("span", { class: "soft" }, "no parameters are known"));
  const steps = Array.from({ length: 24 }, (_, i) => make("i", { style: `background: oklch(var(--light) var(--chroma) ${262 - (232 * i) / 23})` }));
  if (buckets.length) $("legend").append("first bucket", make("span", { class: "ramp" }, steps), "last");
}

// --- the rest -------------------------------------------------------------------------------------

function sizes() {
  if (!report.sizes.length) return $("sizesection").remove();
  const most = Math.max(...report.sizes.map((s) => s.exposed)) || 1;
  const box = make("div", { class: "sizes" });
  for (const each of report.sizes) {
    const now = each.bucket_mb === report.settings.bucket_mb ? "now" : "";
    box.append(make("span", { class: `n ${now}` }, mib(each.bucket_mb)), make("span", { class: "soft" }, plural(each.buckets, "bucket")),
      make("span", { class: `meter ${now}`, style: `width: ${(100 * each.exposed) / most}%` }), make("span", { class: `n ${now}` }, duration(each.exposed)));
  }
  $("sizes").append(box, make("p", {}, "predicted sending that no computation would hide"));
}

function outside() {
  const box = $("outside");
  for (const [state, [, title]] of Object.entries(STATES)) {
    const members = report.parameters.filter((p) => p.state === state);
    if (!members.length) continue;
    box.append(make("h3", { "data-state": state, "data-count": members.length }, `${title}: ${plural(members.length, "parameter")}, ${size(sum(members.map((p) => p.nbytes)))}`));
    const groups = new Map();
    for (const p of members) {
      const key = `${p.reason}\u0000${p.source ? `${p.source.file}:${p.source.line}` : ""}`;
      groups.set(key, [...(groups.get(key) || []), p]);
    }
    for (const group of groups.values()) {
      const names = make("div", { class: "mono names" }, group.slice(0, 12).map((p) => p.name).join(", "));
      if (group.length > 12) names.append(" ", make("button", { onclick: () => names.replaceChildren(group.map((p) => p.name).join(", ")) }, `… ${group.length - 12} more`));
      box.append(names, make("div", { class: "soft" }, state === "frozen" ? "" : group[0].reason));
      if (group[0].source) box.append(make("span", { class: "src mono" }, `${line(group[0].source)}  ${group[0].source.text}`));
    }
  }
  for (const each of report.breaks) box.append(make("h3", {}, "graph break"), make("div", {}, each.reason), make("span", { class: "src mono" }, each.source ? `${each.source.file}:${each.source.line}  ${each.source.text}` : ""));
  const tied = report.parameters.filter((p) => p.tied.length);
  if (tied.length) box.append(make("h3", {}, "tied"), ...tied.map((p) => make("div", { class: "mono names" }, [p.name, ...p.tied].join(" = "))));
  if (!box.children.length) box.append(make("span", { class: "soft" }, "every parameter is in a bucket"));
}

function fold(title, figure, code, isDiff) {
  const box = make("details", { class: "code" }, make("summary", {}, make("span", {}, title), make("span", { class: "figure" }, figure)));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    const pre = make("pre", {});
    if (isDiff) for (const row of code.split("\n")) pre.append(make("span", { class: { "+": "add", "-": "del", "@": "at" }[row[0]] || "" }, row), "\n");
    else pre.textContent = code;
    box.append(pre);
  });
  return box;
}

function graphs() {
  const box = $("graphs");
  for (const graph of report.graphs) {
    const ended = graph.broken_by ? `; ended by a graph break at ${line(graph.broken_by.source)}` : "";
    box.append(make("h3", {}, `graph ${graph.index}: backward of ${plural(graph.nodes, "node")} in ${plural(graph.pieces.length, "piece")}${ended}`));
    for (const each of graph.passes) {
      const figure = `${each.diff ? `+${each.added} −${each.removed} lines · ` : ""}${duration(each.seconds)}`;
      box.append(each.diff ? fold(`pass ${each.name}`, figure, each.diff, true) : make("details", { class: "code" }, make("summary", {}, make("span", {}, `pass ${each.name}`), make("span", { class: "figure" }, `leaves the graph as it is · ${duration(each.seconds)}`))));
    }
    for (const piece of graph.pieces) {
      const figure = `${plural(piece.nodes, "node")} · ${digits(piece.flops / 1e9, 3)} GFLOP · ${duration(piece.measured ?? piece.predicted)}${piece.measured === null ? "" : " measured"}`;
      const then = graph.buckets.filter((b) => b.piece === piece.index).map((b) => `, then bucket ${b.index}`);
      if (piece.code) box.append(fold(`piece ${piece.index}${then.join("")}`, figure, piece.code));
    }
    for (const name of ["dynamo", "forward", "backward"]) if (graph[name]) box.append(fold(`${name} graph`, plural(graph[name].split("\n").length, "line"), graph[name]));
    if (!graph.dynamo && !graph.passes.length) box.append(make("div", { class: "soft" }, "graphs were not kept: use fxddp.backend(keep_graphs=True), or explain the model with its inputs"));
  }
  if (!report.graphs.length) box.append(make("span", { class: "soft" }, "nothing with a backward was compiled"));
}

function settings() {
  const origin = (what) => (report.assumed.includes(what) ? " (assumed)" : report.measured.includes(what) ? " (measured)" : "");
  const list = Object.entries(report.settings).map(([name, value]) => [name, typeof value === "number" ? digits(value, 4) : value === null || (typeof value === "object" && !Object.keys(value).length) ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)]);
  if (network) list.push(["network", `${digits((network.bandwidth * 8) / 1e9, 4)} Gbit/s${origin("bandwidth")}, ${duration(network.latency)} a message${origin("latency")}: ring all-reduce`]);
  list.push(["machine", `${digits(report.machine.flops / 1e12, 3)} TFLOP/s${origin("flops")}, ${digits(report.machine.memory / 1e9, 4)} GB/s of memory${origin("memory_bandwidth")}`]);
  if (network?.cpu_per_byte && network.world_size > 1 && report.timeline.length && report.settings.bucket_mb === "auto")
    list.push(["processor", `"auto" knows sending takes ${duration(network.cpu_per_call)} a bucket and ${duration(network.cpu_per_byte * sent(2 ** 20))} a MiB from it; predicted times do not`]);
  $("settings").append(make("dl", {}, list.flatMap(([name, value]) => [make("dt", {}, name), make("dd", { class: "mono" }, value)])));
}

function theme() {
  const asked = location.hash.match(/theme=(light|dark)/);
  const set = (name) => { root.dataset.theme = name; };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  set(asked ? asked[1] : dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
}

theme();
head();
timelines();
bucketTable();
modules();
sizes();
outside();
graphs();
settings();
root.dataset.ready = "true";
