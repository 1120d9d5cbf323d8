// Draws the page's payload: a JSON text, then one byte for each entry of the heat maps' lower triangles.
"use strict";
const byId = id => document.getElementById(id);
const sigmoid = x => 1 / (1 + Math.exp(-x));
const SYMBOLS = { "\n": "↵", "\t": "⇥" };
const shown = token => SYMBOLS[token] ?? (token.trim() || "␣");
const state = { layer: 0, head: 0, step: 0, mix: 0, dynamic: 1 };
let data, maps, length, spans = [];

async function unpack() {
  const packed = Uint8Array.from(atob(byId("payload").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(bytes.buffer).getUint32(0, true);
  data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  length = data.tokens.length;
  maps = bytes.subarray(4 + size);
}

// Returns one triangle: levels between 0 and 255 (255 is the peak of the row), and the values they stand for.
function triangle(kind) {
  const heads = data.layers[0].heads.length;
  const index = 2 * (state.layer * heads + state.head) + (kind === "activation" ? 0 : 1);
  const offset = index * length * (length + 1) / 2, peaks = data.peaks[index];
  const level = (row, column) => maps[offset + row * (row + 1) / 2 + column];
  return { level, peaks, value: (row, column) => (level(row, column) / 255) ** 2 * peaks[row] };
}
const numbered = position => position - data.registers + 1;  // tokens count from 1; registers are not tokens
const layer = () => data.layers[state.layer];
const slotOf = key => layer().layout === "lag" ? state.step - key : key;
const keyOf = (step, slot) => layer().layout === "lag" ? step - slot : slot;

function colours() {
  const style = getComputedStyle(document.documentElement);
  const parse = name => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const full = hex.length === 3 ? [...hex].map(c => c + c).join("") : hex;
    return [0, 2, 4].map(i => parseInt(full.slice(i, i + 2), 16));
  };
  const names = { paper: "--paper", ink: "--ink", more: "--R", less: "--S", line: "--line" };
  return Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, parse(variable)]));
}
const STEPS = 255;
const palette = (from, to) => Array.from({ length: STEPS + 1 }, (_, i) => blend(from, to, i / STEPS));
const blend = (from, to, share) => from.map((value, i) => value + (to[i] - value) * share);

function paint(canvas, width, height, colourAt) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  let at = 0;
  for (let row = 0; row < height; row++)
    for (let column = 0; column < width; column++) {
      const [red, green, blue] = colourAt(row, column);
      image.data[at++] = red; image.data[at++] = green; image.data[at++] = blue; image.data[at++] = 255;
    }
  context.putImageData(image, 0, 0);
}

function drawText() {
  const { level } = triangle("contribution"), activation = triangle("activation").level;
  const selects = layer().activation !== "softmax";
  spans.forEach((span, key) => {
    const past = key <= state.step;
    const share = past ? level(state.step, key) / 255 : 0;
    const percent = Math.round(75 * share);
    span.style.background = share ? `color-mix(in srgb, var(--R) ${percent}%, transparent)` : "";
    span.classList.toggle("later", !past);
    span.classList.toggle("chosen", key === state.step);
    span.classList.toggle("active", past && selects && activation(state.step, slotOf(key)) > 0);
  });
  const strongest = layer().heads[state.head].strongest[state.step];
  const lines = strongest.map(([key, percent]) => {
    const back = state.step - key;
    const where = back ? `${back} back` : "itself";
    return `“${shown(data.tokens[key])}”, ${where}: ${percent} % of the summed lengths of all contributions`;
  });
  if (!lines.length) lines.push("No slot is active here: the head's output is zero. Choose another head, layer or token.");
  byId("memory").replaceChildren(...lines.map(line => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
  const chosen = shown(data.tokens[state.step]);
  byId("where").textContent = `${numbered(state.step)} of ${length - data.registers}: “${chosen}”`;
}

function drawMap(kind) {
  const { level, peaks } = triangle(kind), { paper, ink, line } = colours();
  const shades = palette(paper, ink), absent = blend(paper, line, 0.5);
  const most = peaks.reduce((a, b) => Math.max(a, b), 1e-30);
  const scale = peaks.map(peak => Math.sqrt(peak / most));
  const shadeAt = (row, column) => shades[Math.ceil(level(row, column) * scale[row])];
  paint(byId(kind), length, length, (row, column) => column > row ? absent : shadeAt(row, column));
}

const svg = (width, height, parts, label) =>
  `<svg role="img" aria-label="${label}" viewBox="0 0 ${width} ${height}">${parts.join("")}</svg>`;
const tick = (x, y, text) => `<text class="tick" text-anchor="middle" x="${x}" y="${y}">${text}</text>`;

function drawKernels() {
  const mix = layer().heads[state.head].mixes[state.mix], place = byId("kernels");
  for (const name of ["mixes", "effective-card"]) byId(name).hidden = !mix;
  if (!mix) { place.innerHTML = "<p>This layer does not mix along the sequence.</p>"; return; }
  const width = 440, panel = 130, slots = mix.diag.length, rank = mix.left[0].length, parts = [];
  const across = slot => 8 + (width - 16) * Math.log2(1 + slot) / Math.log2(Math.max(2, slots));
  const curves = (rows, top, name) => {
    const most = rows.flat().concat(mix.diag).reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
    const down = value => top + panel / 2 - value / most * (panel / 2 - 16);
    const point = (value, slot) => `${across(slot).toFixed(1)},${down(value).toFixed(1)}`;
    const path = values => "M" + values.map(point).join("L");
    parts.push(`<line class="zero" x1="8" x2="${width - 8}" y1="${down(0)}" y2="${down(0)}"/>`);
    for (let r = 0; r < rank; r++) {
      const curve = `<path class="curve" d="${path(rows.map(row => row[r]))}"/>`;
      parts.push(`<g class="series c${r % 8}" data-tip="${name}, pattern ${r + 1}">${curve}</g>`);
    }
    parts.push(`<path d="${path(mix.diag)}" fill="none" stroke="var(--ink)" stroke-width="2.5"/>`);
    parts.push(`<text x="8" y="${top + 12}">${name}, up to ±${most.toPrecision(2)}</text>`);
  };
  const [from, to] = transposed(mix) ? [mix.right, mix.left] : [mix.left, mix.right];
  curves(from, 0, "reads from");
  curves(to, panel + 8, "writes to");
  for (const slot of [0, 1, 3, 7, 15, 31, 63, 127, 255, 511].filter(s => s < slots))
    parts.push(tick(Math.max(12, Math.min(width - 14, across(slot))), 2 * panel + 24, slot));
  place.innerHTML = svg(width, 2 * panel + 30, parts, "lag kernels");
}

// The operator applies the second mix transposed: R1 passes from row to column, R2 from column to row.
const transposed = mix => mix.name.startsWith("R2");

function drawEffective() {
  const mix = layer().heads[state.head].mixes[state.mix];
  if (!mix) return;
  const count = state.step + 1, gate = mix.gate[state.step], added = new Float32Array(count * count);
  let most = 1e-9;
  for (let i = 0; i < count; i++) {
    const left = mix.left[i].map((value, r) => value * gate[r]);
    for (let j = 0; j < count; j++) {
      let sum = i === j ? mix.diag[i] : 0;
      for (let r = 0; r < left.length; r++) sum += left[r] * mix.right[j][r];
      added[i * count + j] = sum;
      most = Math.max(most, Math.abs(sum));
    }
  }
  const { paper, more, less } = colours();
  const above = palette(paper, more), below = palette(paper, less);
  paint(byId("effective"), count, count, (i, j) => {
    const share = added[transposed(mix) ? j * count + i : i * count + j] / most;
    return (share > 0 ? above : below)[Math.round(STEPS * Math.sqrt(Math.abs(share)))];
  });
  byId("effective").dataset.peak = most.toPrecision(3);
}

const GATES = {
  query: "on the queries",
  output: "on the head's output",
  mix1: "in the first mix",
  mix2: "in the second mix",
};
function drawGates() {
  const entries = Object.entries(layer().gates);
  byId("gates").innerHTML = entries.map(([name, shares]) => {
    const most = Math.max(...shares), width = 440, height = 110;
    const bars = shares.map((share, i) => {
      const tall = share / most * 78, wide = (width - 16) / shares.length;
      const [from, to] = [i, i + 1].map(edge => (edge / shares.length).toFixed(2));
      const tip = `${from} to ${to}: ${(100 * share).toFixed(1)} %`;
      const box = `x="${8 + i * wide}" y="${88 - tall}" width="${wide - 1}" height="${tall}"`;
      return `<rect ${box} fill="var(--R)" data-tip="${tip}"/>`;
    });
    const ticks = [0, 0.5, 1].map(x => tick(14 + x * (width - 28), 104, x));
    const chart = svg(width, height, [...bars, ...ticks], "histogram");
    return `<section class="card"><h3>Gates ${GATES[name]}</h3><figure>${chart}</figure></section>`;
  }).join("") || "<p>This layer has no gates.</p>";
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

// Returns the pre-activations at a point of the plane, as hypermlp.inspect.panels.pre_activations does.
function preActivations(routing, a, b, dynamic) {
  const at = (rows, i, scale) => rows[0][i] + scale * (a * rows[1][i] + b * rows[2][i]);
  const query = routing.query[0].map((_, d) =>
    at(routing.query, d, 1) * (routing.query_gate ? sigmoid(at(routing.query_gate, d, dynamic)) : 1));
  const scores = routing.keys.map(key => dot(key, query));
  const mix = routing.mix;
  if (!mix) return scores;
  const read = mix.left[0].map((_, r) => {
    let sum = 0;
    for (let j = 0; j < scores.length; j++) sum += scores[j] * mix.left[j][r];
    return sum * sigmoid(at(routing.mix_gate, r, dynamic));
  });
  return scores.map((score, i) => {
    let sum = score * (1 + mix.diag[i]);
    for (let r = 0; r < read.length; r++) sum += read[r] * mix.right[i][r];
    return sum;
  });
}
function activePattern(a, b, dynamic) {
  const h = preActivations(layer().heads[state.head].routing, a, b, dynamic);
  return h.map(value => value > 0 ? "1" : "0").join("");
}

function drawRouting() {
  const canvas = byId("routing-map"), routing = layer().heads[state.head].routing, size = 180;
  if (!canvas) return;
  byId("no-routing").hidden = !!routing;
  canvas.hidden = !routing;
  if (!routing) { byId("regions").textContent = ""; return; }
  const patterns = [];
  for (let row = 0; row < size; row++)
    for (let column = 0; column < size; column++)
      patterns.push(activePattern(2 * column / (size - 1) - 1, 1 - 2 * row / (size - 1), state.dynamic));
  const { paper, ink, more, less } = colours(), slots = routing.keys.length;
  const on = pattern => [...pattern].filter(bit => bit === "1").length / slots;
  const colour = share => blend(paper, blend(less, more, share), 0.15 + 0.6 * share);
  const shade = new Map([...new Set(patterns)].map(pattern => [pattern, colour(on(pattern))]));
  paint(canvas, size, size, (row, column) => {
    const here = patterns[row * size + column];
    if (Math.hypot(row - size / 2, column - size / 2) < 3) return ink;
    const left = column > 0 ? patterns[row * size + column - 1] : here;
    const above = row > 0 ? patterns[(row - 1) * size + column] : here;
    return left !== here || above !== here ? blend(shade.get(here), ink, 0.55) : shade.get(here);
  });
  byId("dynamic-value").textContent = state.dynamic;
  byId("regions").textContent = `${shade.size} regions in view; the dot is the input itself.`;
}

function fillMixes() {
  const mixes = layer().heads[state.head].mixes;
  state.mix = Math.min(state.mix, Math.max(0, mixes.length - 1));
  byId("mix").replaceChildren(...mixes.map((mix, i) => new Option(mix.name, i, false, i === state.mix)));
}
function drawStep() {
  drawText();
  drawEffective();
  for (const marker of document.querySelectorAll(".map i"))
    marker.style.top = `${100 * (state.step + 0.5) / length}%`;
}
function drawAll() {
  fillMixes();
  drawStep();
  drawMap("activation");
  drawMap("contribution");
  drawKernels();
  drawGates();
  drawRouting();
}

let waiting = false;
function choose(step) {
  state.step = Math.max(data.registers, Math.min(length - 1, step));
  byId("step").value = state.step;
  if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; drawStep(); }); }
}

function listen() {
  for (const name of ["layer", "head"])
    byId(name).addEventListener("change", event => { state[name] = +event.target.value; drawAll(); });
  byId("mix").addEventListener("change", event => {
    state.mix = +event.target.value;
    drawKernels();
    drawEffective();
  });
  byId("step").addEventListener("input", event => choose(+event.target.value));
  byId("dynamic")?.addEventListener("input", event => {
    state.dynamic = +event.target.value;
    drawRouting();
  });
  const text = byId("text");
  let resting = "";  // place of the pointer: text that scrolls under a resting pointer is not chosen
  const moved = event => {
    const before = resting;
    resting = `${event.clientX},${event.clientY}`;
    return resting !== before;
  };
  const chooseTarget = event => { if (event.target.dataset.key) choose(+event.target.dataset.key); };
  text.addEventListener("pointermove", moved);
  text.addEventListener("pointerdown", chooseTarget);
  text.addEventListener("pointerover", event => { if (moved(event)) chooseTarget(event); });
  text.addEventListener("keydown", event => {
    const to = { ArrowLeft: state.step - 1, ArrowRight: state.step + 1, Home: 0, End: length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
    spans[state.step].scrollIntoView({ block: "nearest" });
  });
  for (const kind of ["activation", "contribution"]) {
    const canvas = byId(kind);
    const place = event => {
      const box = canvas.getBoundingClientRect();
      return [event.clientY - box.top, event.clientX - box.left].map((at, i) =>
        Math.max(0, Math.min(length - 1, Math.floor(at / (i ? box.width : box.height) * length))));
    };
    const showTip = event => {
      const [row, column] = place(event), key = kind === "activation" ? keyOf(row, column) : column;
      if (column > row) { canvas.dataset.tip = "no such slot at this step"; return; }
      const value = triangle(kind).value(row, column).toPrecision(2);
      const [at, from] = [row, key].map(position => `“${shown(data.tokens[position])}”`);
      const source = kind === "activation" ? `slot ${column}, ${from}` : `from ${from}`;
      canvas.dataset.tip = `at ${at}\n${source}, ${row - key} back: about ${value}`;
    };
    canvas.addEventListener("pointermove", showTip);
    canvas.addEventListener("pointerdown", event => { showTip(event); choose(place(event)[0]); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

// Opens the page at the first head that is active at the last token; at the first head if none is.
function chooseHead() {
  data.layers.some((each, layer) => each.heads.some((head, index) => {
    if (!head.strongest[state.step].length) return false;
    [state.layer, state.head] = [layer, index];
    return true;
  }));
  byId("layer").value = state.layer;
  byId("head").value = state.head;
}

unpack().then(() => {
  state.step = length - 1;
  chooseHead();
  spans = data.tokens.map((token, key) => {
    const span = document.createElement("span");
    span.textContent = token.replaceAll("\n", "↵\n");
    if (key < data.registers) span.className = "register";
    span.dataset.key = key;
    return span;
  });
  byId("text").replaceChildren(...spans);
  listen();
  drawAll();
  document.body.dataset.ready = "yes";
});
