// Draws the timelines of a report: lanes of every step over time, with memory below them, on a canvas.
//
// A span narrower than a pixel is not drawn as a pixel: the spans of one pixel are stacked, each as high as the share
// of the pixel's time that it fills. So the coloured area of a lane is its busy time at every zoom.
"use strict";

const LEAST_VIEW_S = 2e-7;
const LEAST_SHARE = 0.14; // a pixel with any work is at least this high, so that short work can be seen
const ROWS = { axis: 22, title: 20, compute: 32, lane: 15, device: 170, host: 84, gap: 4, memoryGap: 22 };
const ZOOM = 1.6;
const BUFFERS_SHOWN = 5;
const TYPES = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array, u4: Uint32Array };
const UNKNOWN = 0xffffffff;
const BUBBLE = "pipeline bubble"; // as views/palette.py names it
const PHASE_WORDS = { fwd: "forward", bwd: "backward", rec: "recompute", off: "offload", pre: "prefetch" };

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = await new Response(stream).arrayBuffer();
  const length = new DataView(raw).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, length)));
  const begin = Math.ceil((4 + length) / 8) * 8;
  const column = ([kind, at, count]) => new TYPES[kind](raw, begin + at, count);
  return { header, steps: header.steps.map((step) => new Step(step, column, header)) };
}

class Step {
  constructor(document, column, header) {
    Object.assign(this, document);
    const gap = column(this.gap), length = column(this.length);
    this.lane = column(this.lane);
    this.place = column(this.place);
    this.work = column(this.work);
    const rows = length.length;
    this.start = new Float64Array(rows);
    this.end = new Float64Array(rows);
    const ended = this.lanes.map(() => 0), count = this.lanes.map(() => 0);
    this.busy = this.lanes.map(() => 0);
    for (let row = 0; row < rows; row++) {
      const lane = this.lane[row], begin = ended[lane] + gap[row];
      this.start[row] = begin * 1e-9;
      ended[lane] = begin + length[row];
      this.end[row] = ended[lane] * 1e-9;
      this.busy[lane] += length[row] * 1e-9;
      count[lane]++;
    }
    this.rows = count.map((n) => new Uint32Array(n));
    const next = this.lanes.map(() => 0);
    for (let row = 0; row < rows; row++) this.rows[this.lane[row]][next[this.lane[row]]++] = row;
    this.colours = this.places.map(([, phase, , layer]) => {
      const colour = (header.phases[phase] || [phase, header.other])[1];
      return layer > 0 && layer % 2 ? mixed(colour, "#ffffff", 0.28) : colour;
    });
    this.waitOf = new Map();
    const waitRow = column(this.wait_row), waitFor = column(this.wait_for), waitS = column(this.wait_s);
    waitRow.forEach((row, i) => this.waitOf.set(row, { seconds: waitS[i], source: waitFor[i] }));
    const stallRow = column(this.stall_row), cause = column(this.stall_cause);
    const after = column(this.stall_after), stallS = column(this.stall_s);
    this.stalls = this.lanes.map(() => []);
    stallRow.forEach((row, i) => {
      const start = this.start[row] - this.waitOf.get(row).seconds + after[i];
      this.stalls[this.lane[row]].push({ row, start, end: start + stallS[i], cause: this.causes[cause[i]] });
    });
    this.memory = { device: curve(this.device, column), host: curve(this.host, column) };
    if (this.buffers) {
      for (const name of ["class_of", "lower", "upper", "bytes", "instant"]) {
        this.buffers[name] = column(this.buffers[name]);
      }
    }
  }

  id(row) {
    const [where, , written] = this.places[this.place[row]], name = this.works[this.work[row]][0];
    return written ? `${where}/${written}/${name}` : name;
  }

  waitLane(row) {
    const wait = this.waitOf.get(row);
    return wait.source === UNKNOWN ? "other" : this.lanes[this.lane[wait.source]];
  }

  // The number in `rows` of the first span that ends after `time`.
  first(rows, time) {
    let low = 0, high = rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[rows[middle]] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // The largest buffers that are alive at a point of the device's memory curve.
  largest(point) {
    const { lower, upper, bytes, names, instant } = this.buffers, at = instant[point], found = [];
    let total = 0;
    for (let i = 0; i < lower.length; i++) {
      if (lower[i] > at || upper[i] <= at) continue;
      total++;
      if (found.length === BUFFERS_SHOWN && bytes[found[BUFFERS_SHOWN - 1]] >= bytes[i]) continue;
      let place = found.length;
      while (place > 0 && bytes[found[place - 1]] < bytes[i]) place--;
      found.splice(place, 0, i);
      found.length = Math.min(found.length, BUFFERS_SHOWN);
    }
    return { total, largest: found.map((i) => [names[i], bytes[i]]) };
  }
}

function curve(document, column) {
  const summed = (values, scale) => {
    let sum = 0;
    return Float64Array.from(values, (value) => (sum += value) * scale);
  };
  const time = summed(column(document.time), 1e-9);
  const live = document.bytes.map((changes) => summed(column(changes), 1));
  const total = Float64Array.from(time, (_, i) => live.reduce((sum, values) => sum + values[i], 0));
  return { classes: document.classes, time, live, total, peak: total.reduce((a, b) => Math.max(a, b), 0) };
}

function pointAt(time, at) {
  let low = 0, high = time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (time[middle] <= at) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
}

function parts(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function mixed(colour, other, share) {
  const b = parts(other);
  return "#" + parts(colour).map((p, i) => Math.round(p + (b[i] - p) * share).toString(16).padStart(2, "0")).join("");
}

function inkOn(colour) {
  const [red, green, blue] = parts(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue < 145 ? "#ffffff" : "#16191d";
}

function plainNumber(value, digits) {
  const whole = Math.max(1, Math.floor(Math.log10(Math.max(Math.abs(value), 1))) + 1);
  return value.toFixed(Math.max(0, digits - whole));
}

function seconds(value, digits = 3) {
  if (value === 0) return "0 s";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (Math.abs(value) >= scale || unit === "µs") return `${plainNumber(value / scale, digits)} ${unit}`;
  }
}

function size(bytes) {
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (bytes >= 0.1 * scale) return `${(bytes / scale).toFixed(2)} ${unit}`;
  }
  return `${bytes} B`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function swatch(colour, hatched) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("class", "swatch");
  made.setAttribute("viewBox", "0 0 12 12");
  made.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(made.namespaceURI, hatched ? "path" : "rect");
  if (hatched) {
    path.setAttribute("d", "M0 12L12 0M-4 8L8 -4M4 16L16 4");
    path.setAttribute("stroke", colour);
    path.setAttribute("stroke-width", "1.6");
  } else {
    path.setAttribute("width", "12");
    path.setAttribute("height", "12");
    path.setAttribute("fill", colour);
  }
  made.append(path);
  return made;
}

class Timeline {
  constructor(root, { header, steps }) {
    Object.assign(this, { root, header, steps });
    this.end = Math.max(...steps.map((step) => step.end_s), 1e-9);
    this.from = 0;
    this.to = this.end;
    this.open = new Set(steps.length <= 2 ? steps.keys() : []);
    const fullest = steps.reduce((best, step, i) => (step.memory.device.peak > steps[best].memory.device.peak ? i : best), 0);
    this.shown = fullest;
    this.plot = root.querySelector(".plot");
    this.base = element("canvas");
    this.over = element("canvas", "over");
    this.tip = element("div", "tip");
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    this.plot.append(this.base, this.over, this.tip);
    this.range = root.querySelector(".range");
    this.controls();
    this.pointer();
    this.keys();
    new ResizeObserver(() => this.redraw()).observe(this.plot);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.draw());
    this.legend();
    this.draw();
    root.dataset.spans = steps.reduce((sum, step) => sum + step.start.length, 0);
    root.dataset.ready = "yes";
  }

  controls() {
    const act = { in: () => this.zoom(1 / ZOOM), out: () => this.zoom(ZOOM), whole: () => this.view(0, this.end) };
    for (const button of this.root.querySelectorAll("button[data-do]")) {
      button.addEventListener("click", () => act[button.dataset.do]());
    }
    const choices = this.root.querySelector(".choices");
    if (this.steps.length < 2) return;
    const all = element("input");
    all.type = "checkbox";
    all.checked = this.open.size === this.steps.length;
    all.addEventListener("change", () => {
      this.open = new Set(all.checked ? this.steps.keys() : []);
      this.redraw();
    });
    const lanes = element("label", "", " all lanes");
    lanes.prepend(all);
    const chosen = element("select");
    this.steps.forEach((step, i) => chosen.append(new Option(step.name, i, i === this.shown, i === this.shown)));
    chosen.addEventListener("change", () => { this.shown = Number(chosen.value); this.legend(); this.redraw(); });
    const memory = element("label", "", "memory of ");
    memory.append(chosen);
    choices.append(lanes, memory);
  }

  legend() {
    const legend = this.root.querySelector(".legend");
    legend.replaceChildren();
    const group = (title, entries) => {
      if (!entries.length) return;
      const list = element("ul");
      list.setAttribute("aria-label", title);
      list.append(element("li", "quiet", title));
      for (const [label, colour, hatched] of entries) {
        const item = element("li");
        item.append(swatch(colour, hatched), label);
        list.append(item);
      }
      legend.append(list);
    };
    const present = new Set(this.steps.flatMap((step) => step.places.map(([, phase]) => phase)));
    const phases = new Map();
    for (const [phase, [label, colour]] of Object.entries(this.header.phases)) {
      if (present.has(phase)) phases.set(label, colour);
    }
    group("work", [...phases]);
    const waits = new Map();
    for (const step of this.steps) {
      step.lanes.forEach((lane, number) => {
        if (lane !== "compute") return;
        for (const { cause, start, end } of step.stalls[number]) waits.set(cause, (waits.get(cause) || 0) + end - start);
      });
    }
    const longest = [...waits].sort((a, b) => b[1] - a[1]).slice(0, 6);
    group(this.steps.length > 1 ? "waits, all stages" : "compute waits for", longest.map(([lane, s]) => [`${lane} ${seconds(s)}`, this.waitColour(lane), true]));
    const { device, host } = this.steps[this.shown].memory;
    const classes = [...new Set([...device.classes, ...host.classes])];
    group("memory", classes.map((name) => [name, this.header.classes[name] || this.header.other]));
  }

  waitColour(lane) {
    const colour = this.header.waits[lane] || this.header.quiet;
    return this.dark ? mixed(colour, "#ffffff", 0.35) : colour;
  }

  get dark() {
    return matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  view(from, to) {
    const length = Math.min(Math.max(to - from, LEAST_VIEW_S), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - length);
    this.to = this.from + length;
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
    this.hide();
    this.redraw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.view(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.view(this.from + by, this.to + by);
  }

  x(time) { return this.gutter + ((time - this.from) / (this.to - this.from)) * this.width; }

  time(x) { return this.from + ((x - this.gutter) / this.width) * (this.to - this.from); }

  // Rows from top to bottom: the axis, the lanes of every step, the memory of the chosen one.
  layout() {
    const rows = [{ kind: "axis", y: 0, height: ROWS.axis }];
    let y = ROWS.axis;
    const add = (row) => { rows.push({ ...row, y }); y += row.height + ROWS.gap; };
    this.steps.forEach((step, number) => {
      const several = this.steps.length > 1, open = this.open.has(number);
      if (several && open) add({ kind: "title", step, number, height: ROWS.title });
      step.lanes.forEach((lane, i) => {
        if (!open && lane !== "compute") return;
        const height = lane === "compute" ? (several && !open ? 24 : ROWS.compute) : ROWS.lane;
        add({ kind: "lane", step, number, lane: i, height, closed: several && !open });
      });
    });
    const step = this.steps[this.shown];
    for (const side of ["device", "host"]) {
      if (step.memory[side].peak > 0) {
        y += ROWS.memoryGap;
        add({ kind: "memory", side, step, height: ROWS[side] });
      }
    }
    this.rows = rows;
    this.height = y + 4;
  }

  draw() {
    const style = getComputedStyle(this.root), full = this.plot.clientWidth;
    if (!full) return;
    const dark = this.dark;
    if (this.wasDark !== dark) { this.wasDark = dark; this.legend(); }
    this.ink = style.getPropertyValue("--ink").trim();
    this.quiet = style.getPropertyValue("--quiet").trim();
    this.rule = style.getPropertyValue("--rule").trim();
    this.ground = style.getPropertyValue("--ground").trim();
    this.alarm = style.getPropertyValue("--alarm").trim();
    this.narrow = full < 620;
    this.gutter = this.narrow ? 64 : 128;
    this.width = full - this.gutter - 8;
    this.layout();
    const scale = devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.round(full * scale);
      canvas.height = Math.round(this.height * scale);
      canvas.style.width = `${full}px`;
      canvas.style.height = `${this.height}px`;
    }
    const g = (this.g = this.base.getContext("2d"));
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.textBaseline = "middle";
    this.font(11);
    this.axis();
    for (const row of this.rows) {
      if (row.kind === "title") this.title(row);
      if (row.kind === "lane") this.drawLane(row);
      if (row.kind === "memory") this.drawMemory(row);
    }
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
    this.range.textContent = `${seconds(this.from, 4)} to ${seconds(this.to, 4)} of ${seconds(this.end, 4)}`;
  }

  font(px, weight = "") { this.g.font = `${weight} ${px}px system-ui, sans-serif`; }

  axis() {
    const g = this.g, length = this.to - this.from;
    const least = (length * (this.narrow ? 70 : 90)) / this.width, power = 10 ** Math.floor(Math.log10(least));
    const pace = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
    const [unit, scale] = length >= 1.5 ? ["s", 1] : length >= 1.5e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
    // Far from the step's start a number in a small unit has too many digits: it counts from a round time instead.
    const base = this.from / scale > 9999 ? Math.floor(this.from / (1000 * scale)) * 1000 * scale : 0;
    const digits = Math.max(0, -Math.floor(Math.log10(pace / scale) + 1e-9));
    g.fillStyle = this.quiet;
    g.textAlign = "right";
    if (base) g.fillText(`${plainNumber(base, 7)} s +`, this.gutter - 6, ROWS.axis / 2);
    g.textAlign = "center";
    for (let n = Math.ceil(this.from / pace); n * pace <= this.to; n++) {
      const x = this.x(n * pace), label = `${((n * pace - base) / scale).toFixed(digits)} ${unit}`;
      g.fillStyle = this.rule;
      for (const { kind, y, height } of this.rows) {
        if (kind === "axis") g.fillRect(Math.round(x), height - 5, 1, 5);
        if (kind === "memory") g.fillRect(Math.round(x), y, 1, height);
      }
      const half = g.measureText(label).width / 2, right = this.gutter + this.width + 8;
      g.fillStyle = this.quiet;
      if (x + half <= right) g.fillText(label, Math.max(x, this.gutter + half), ROWS.axis / 2 - 2);
    }
  }

  title({ step, number, y, height }) {
    const g = this.g;
    this.font(12, "600");
    g.textAlign = "left";
    g.fillStyle = this.ink;
    g.fillText(`▾ ${step.name}`, 4, y + height / 2 + 2, this.gutter + this.width);
    this.font(11);
  }

  drawLane(row) {
    const g = this.g, { step, lane, y, height } = row, rows = step.rows[lane];
    const share = step.busy[lane] / (step.end_s || 1);
    g.textAlign = "right";
    g.fillStyle = row.closed ? this.ink : this.quiet;
    const name = row.closed ? `▸ ${step.name.split(" · ")[0]}` : step.lanes[lane];
    const exact = (share > 0 && share < 0.0995) || (share > 0.99 && share < 1);
    const percent = (100 * share).toFixed(exact ? 1 : 0);
    const label = this.narrow ? name : `${name}  ${percent} %`;
    g.fillText(label, this.gutter - 8, y + height / 2 + 1, this.gutter - 10);
    g.save();
    g.beginPath();
    g.rect(this.gutter, y, this.width, height);
    g.clip();
    g.fillStyle = this.ground;
    g.fillRect(this.gutter, y, this.width, height);
    if (step.lanes[lane] === "compute") this.drawWaits(row);
    const pixel = (this.to - this.from) / this.width, wide = [];
    let column = -1, filled = new Map();
    const flush = () => {
      let busy = 0;
      for (const part of filled.values()) busy += part;
      if (!busy) return;
      const up = height * Math.min(1, Math.max(busy, LEAST_SHARE));
      let base = y + height;
      for (const [colour, part] of filled) {
        const high = (up * part) / busy;
        g.fillStyle = colour;
        g.fillRect(this.gutter + column, base - high, 1, high);
        base -= high;
      }
      filled.clear();
    };
    const fill = (at, share, colour) => {
      if (at !== column) { flush(); column = at; }
      if (share > 0) filled.set(colour, (filled.get(colour) || 0) + share);
    };
    for (let i = step.first(rows, this.from); i < rows.length; i++) {
      const number = rows[i], start = step.start[number], end = step.end[number];
      if (start >= this.to) break;
      if (end <= start) continue;
      const colour = step.colours[step.place[number]];
      const left = Math.max((start - this.from) / pixel, 0), right = Math.min((end - this.from) / pixel, this.width);
      const first = Math.floor(left), last = Math.floor(right);
      if (first === last) { fill(first, right - left, colour); continue; }
      fill(first, first + 1 - left, colour);
      if (last > first + 1) {
        flush();
        g.fillStyle = colour;
        g.fillRect(this.gutter + first + 1, y, last - first - 1, height);
      }
      fill(last, right - last, colour);
      if (right - left > 12) wide.push(number);
    }
    flush();
    g.fillStyle = this.ground;
    for (const number of wide) g.fillRect(this.x(step.end[number]) - 0.5, y + height - 5, 1, 5);
    this.labels(row, wide);
    g.restore();
  }

  // Write what is played where there is room: the layer's phase above, the instruction below.
  labels(row, wide) {
    const g = this.g, { step, lane, y, height } = row, rows = step.rows[lane], tall = height >= ROWS.compute;
    this.font(tall ? 10.5 : 9.5);
    g.textAlign = "center";
    const write = (candidates, from, to, middle, colour) => {
      const left = this.x(Math.max(from, this.from)), right = this.x(Math.min(to, this.to));
      const text = candidates.find((each) => each && g.measureText(each).width < right - left - 5);
      if (!text) return;
      g.fillStyle = inkOn(colour);
      g.fillText(text, (left + right) / 2, middle);
    };
    const named = wide.some((number) => step.end[number] - step.start[number] > (this.to - this.from) * 0.05);
    const gap = (0.7 * (this.to - this.from)) / this.width;
    let begin = step.first(rows, this.from);
    while (begin < rows.length && step.start[rows[begin]] < this.to) {
      // The longest run of one place without a gap that a reader sees: a text must not lie across a gap.
      const place = step.place[rows[begin]];
      let from = step.start[rows[begin]], to = from, best = [from, from], i = begin;
      for (; i < rows.length && step.place[rows[i]] === place && step.start[rows[i]] < this.to; i++) {
        if (step.start[rows[i]] - to > gap) from = step.start[rows[i]];
        to = step.end[rows[i]];
        const shown = Math.min(to, this.to) - Math.max(from, this.from);
        if (shown > Math.min(best[1], this.to) - Math.max(best[0], this.from)) best = [from, to];
      }
      begin = i;
      if (this.x(best[1]) - this.x(best[0]) <= 9) continue;
      const [where, phase, , layer] = step.places[place], leaf = where.slice(where.lastIndexOf("/") + 1);
      const number = layer >= 0 ? String(layer) : "", word = PHASE_WORDS[phase] || (leaf === phase ? "" : phase);
      const middle = y + (named && tall ? height * 0.28 : height / 2 + 0.5);
      write([`${where} ${word}`, `${leaf} ${word}`, leaf, number], ...best, middle, step.colours[place]);
    }
    if (named && tall) {
      for (const number of wide) {
        const name = step.works[step.work[number]][0];
        write([name], step.start[number], step.end[number], y + height * 0.74, step.colours[step.place[number]]);
      }
    }
    this.font(11);
  }

  drawWaits({ step, lane, y, height }) {
    const g = this.g, pixel = (this.to - this.from) / this.width;
    for (const { start, end, cause } of step.stalls[lane]) {
      if (end <= this.from || start >= this.to || end - start < 1.5 * pixel) continue;
      const left = this.x(Math.max(start, this.from)), right = this.x(Math.min(end, this.to));
      g.save();
      g.beginPath();
      g.rect(left, y, right - left, height);
      g.clip();
      g.strokeStyle = this.waitColour(cause);
      g.lineWidth = 1;
      g.beginPath();
      for (let x = left - height - ((left - height) % 6); x < right; x += 6) {
        g.moveTo(x, y + height);
        g.lineTo(x + height, y);
      }
      g.stroke();
      g.restore();
    }
  }

  drawMemory(row) {
    const g = this.g, { step, side, y, height } = row, memory = step.memory[side], bottom = y + height;
    const capacity = side === "device" ? step.capacity_bytes : null;
    const near = capacity && memory.peak >= 0.4 * capacity;
    const top = (near ? Math.max(capacity, memory.peak) : memory.peak) * 1.04;
    const level = (bytes) => bottom - (bytes / top) * height;
    row.level = level;
    this.font(11, "600");
    g.textAlign = "left";
    g.fillStyle = this.ink;
    const of = this.steps.length > 1 ? `, ${step.name.split(" · ")[0]}` : "";
    const heading = side === "device" ? `Device memory${of}` : `Host memory, one rank${of}`;
    g.fillText(heading, 4, y - 11);
    const after = 4 + g.measureText(heading).width + 12;
    this.font(11);
    g.fillStyle = this.quiet;
    const held = side === "device" && step.held_bytes && Math.abs(step.held_bytes - memory.peak) > 0.005 * memory.peak;
    const most = held ? step.held_bytes : memory.peak;
    const room = capacity ? `, ${((100 * most) / capacity).toFixed(0)} % of ${size(capacity)}` : "";
    const note = `peak ${size(memory.peak)}${held ? ` live, ${step.held_as} ${size(step.held_bytes)}` : ""}${room}`;
    if (after + g.measureText(note).width < this.gutter + this.width) g.fillText(note, after, y - 11);
    g.textAlign = "right";
    const unit = memory.peak >= 2 ** 29 ? ["GiB", 2 ** 30] : memory.peak >= 2 ** 19 ? ["MiB", 2 ** 20] : ["KiB", 1024];
    const least = (top / unit[1]) * (22 / height), power = 10 ** Math.floor(Math.log10(least));
    const pace = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
    for (let n = 0; n * pace * unit[1] <= top; n++) {
      const at = level(n * pace * unit[1]);
      g.fillStyle = this.rule;
      g.fillRect(this.gutter, Math.round(at), this.width, 1);
      g.fillStyle = this.quiet;
      g.fillText(`${Number((n * pace).toPrecision(6))} ${unit[0]}`, this.gutter - 8, at);
    }
    this.stack(row);
    if (near) this.capacity(row, level, capacity, step.reserve_bytes);
  }

  // Draw a column of pixels at a time, at its fullest instant, so that no peak is lost.
  stack({ step, side, y, height, level }) {
    const g = this.g, { time, live, total, classes } = step.memory[side], bottom = y + height;
    const colours = classes.map((name) => this.header.classes[name] || this.header.other);
    const paint = (left, right, point) => {
      let base = 0;
      for (let c = 0; c < colours.length; c++) {
        const bytes = live[c][point];
        if (!bytes) continue;
        const low = level(base), high = level(base + bytes);
        g.fillStyle = colours[c];
        g.fillRect(left, high, right - left, low - high);
        base += bytes;
      }
    };
    g.save();
    g.beginPath();
    g.rect(this.gutter, y - 2, this.width, height + 2);
    g.clip();
    let point = pointAt(time, this.from);
    for (let column = 0; column < this.width && point < time.length; column++) {
      const until = this.time(this.gutter + column + 1);
      if (this.time(this.gutter + column) > step.end_s) break;
      let fullest = point;
      while (point + 1 < time.length && time[point + 1] < until) {
        point++;
        if (total[point] > total[fullest]) fullest = point;
      }
      paint(this.gutter + column, this.gutter + column + 1, fullest);
    }
    g.restore();
  }

  capacity({ y }, level, capacity, reserve) {
    const g = this.g, line = level(capacity), under = level(capacity - reserve);
    g.textAlign = "right";
    if (reserve) {
      g.save();
      g.beginPath();
      g.rect(this.gutter, line, this.width, under - line);
      g.clip();
      g.strokeStyle = this.alarm;
      g.globalAlpha = 0.35;
      g.beginPath();
      for (let x = this.gutter - 40; x < this.gutter + this.width; x += 7) {
        g.moveTo(x, under);
        g.lineTo(x + (under - line), line);
      }
      g.stroke();
      g.restore();
    }
    g.fillStyle = this.alarm;
    g.fillRect(this.gutter, Math.round(line) - 1, this.width, 1.5);
    const label = reserve ? `capacity ${size(capacity)}, of which reserve ${size(reserve)}` : `capacity ${size(capacity)}`;
    if (!this.narrow) g.fillText(label, this.gutter + this.width, y - 11);
  }

  // What lies at a point of the plot: a span, a wait, memory, or a stage's name.
  hit(x, y) {
    const row = this.rows.find((each) => y >= each.y && y < each.y + each.height);
    if (!row) return null;
    if (x < this.gutter) return row.kind === "title" || row.closed ? { toggle: row.number } : null;
    if (row.kind === "title") return { toggle: row.number };
    const time = this.time(x);
    if (row.kind === "memory") return { row, time, point: pointAt(row.step.memory[row.side].time, time) };
    if (row.kind !== "lane") return null;
    const { step, lane } = row, rows = step.rows[lane], near = (1.5 * (this.to - this.from)) / this.width;
    let i = step.first(rows, time);
    while (i < rows.length && step.end[rows[i]] <= step.start[rows[i]]) i++;
    const next = rows[i], before = i > 0 ? rows[i - 1] : undefined;
    if (next !== undefined && step.start[next] <= time) return { row, time, span: next };
    const wait = next === undefined ? undefined : step.waitOf.get(next);
    if (wait && step.start[next] - wait.seconds <= time && wait.seconds > near) return { row, time, waiting: next };
    if (next !== undefined && step.start[next] - time < near) return { row, time, span: next };
    if (before !== undefined && time - step.end[before] < near) return { row, time, span: before };
    return null;
  }

  hover(x, y) {
    const found = this.hit(x, y);
    this.over.style.cursor = found && "toggle" in found ? "pointer" : "crosshair";
    this.cross(x, found);
    const lines = found && "row" in found ? this.about(found) : null;
    if (!lines) { this.tip.hidden = true; return; }
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const { clientWidth } = this.plot, { offsetWidth, offsetHeight } = this.tip;
    const left = x + 14 + offsetWidth <= clientWidth ? x + 14 : Math.max(0, Math.min(x - 14 - offsetWidth, clientWidth - offsetWidth));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${this.tipTop(y, offsetHeight)}px`;
  }

  /* Where the tip stands: on a narrow screen beside the whole plot, because a finger and a wide tip would hide the lanes. */
  tipTop(y, tall) {
    const { top, bottom } = this.plot.getBoundingClientRect();
    if (this.narrow && innerHeight - bottom >= tall + 8) return this.height + 4;
    if (this.narrow && top >= tall + 8) return -tall - 4;
    return y + 18 + tall <= this.height || y - 14 - tall < 0 ? y + 18 : y - 14 - tall;
  }

  cross(x, found) {
    const g = this.over.getContext("2d"), scale = devicePixelRatio || 1;
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, this.over.width, this.over.height);
    if (x < this.gutter) return;
    if (this.drag && this.drag.to !== undefined) {
      const [a, b] = [this.x(this.drag.from), this.x(this.drag.to)].sort((p, q) => p - q);
      g.globalAlpha = 0.18;
      g.fillStyle = this.ink;
      g.fillRect(a, ROWS.axis - 4, b - a, this.height);
      g.globalAlpha = 1;
    }
    g.fillStyle = this.quiet;
    g.globalAlpha = 0.7;
    g.fillRect(Math.round(x), ROWS.axis - 4, 1, this.height);
    g.globalAlpha = 1;
    if (found && found.span !== undefined) {
      const { step, y, height } = found.row, left = this.x(step.start[found.span]), right = this.x(step.end[found.span]);
      g.strokeStyle = this.ink;
      g.lineWidth = 1.5;
      g.strokeRect(Math.max(left, this.gutter), y + 0.5, Math.max(2, Math.min(right, this.gutter + this.width) - Math.max(left, this.gutter)), height - 1);
    }
  }

  about(found) {
    const { row, time } = found, { step } = row;
    if (row.kind === "memory") return this.aboutMemory(row, time, found.point);
    const number = found.span !== undefined ? found.span : found.waiting, wait = step.waitOf.get(number);
    const [name, op] = step.works[step.work[number]], lines = [];
    const waited = wait && `${wait.source === UNKNOWN ? "another rank" : step.id(wait.source)} (${step.waitLane(number)})`;
    if (found.waiting !== undefined) {
      const stall = step.stalls[row.lane].find(({ start, end }) => start <= time && time < end);
      const whole = stall && stall.end - stall.start < 0.999 * wait.seconds ? ` of a wait of ${seconds(wait.seconds)}` : "";
      const name = stall ? `${stall.cause === BUBBLE ? BUBBLE : `waits for ${stall.cause}`} ${seconds(stall.end - stall.start)}${whole}` : "";
      lines.push(element("strong", "", name), element("div", "", `ended by ${waited}`));
      lines.push(element("div", "quiet", `then plays ${step.id(number)}`));
      return lines;
    }
    lines.push(element("strong", "", name), element("code", "", step.id(number)));
    lines.push(element("div", "", `${op} on lane ${step.lanes[step.lane[number]]}${this.steps.length > 1 ? `, ${step.name}` : ""}`));
    lines.push(element("div", "", `starts at ${seconds(step.start[number], 6)}, takes ${seconds(step.end[number] - step.start[number], 4)}`));
    if (wait) lines.push(element("div", "quiet", `waited ${seconds(wait.seconds)} for ${waited}`));
    return lines;
  }

  aboutMemory(row, time, point) {
    const { step, side } = row, memory = step.memory[side];
    if (time > step.end_s) return null;
    const lines = [element("strong", "", `${size(memory.total[point])} at ${seconds(time, 5)}`)];
    const list = element("ul");
    memory.classes.map((name, c) => [name, memory.live[c][point]]).filter(([, bytes]) => bytes).reverse()
      .forEach(([name, bytes]) => {
        const item = element("li");
        item.append(swatch(this.header.classes[name] || this.header.other), element("span", "", name), element("b", "", size(bytes)));
        list.append(item);
      });
    lines.push(list);
    if (side === "device" && step.buffers && point < step.buffers.instant.length) {
      const { total, largest } = step.buffers ? step.largest(point) : {};
      lines.push(element("div", "quiet", `largest of ${total} live buffers`));
      const buffers = element("ul", "buffers");
      for (const [name, bytes] of largest) {
        const item = element("li");
        item.append(element("code", "", name), element("b", "", size(bytes)));
        buffers.append(item);
      }
      lines.push(buffers);
    }
    return lines;
  }

  hide() {
    this.tip.hidden = true;
    const g = this.over.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.over.width, this.over.height);
  }

  // Mouse: drag to zoom into a range. Touch: one finger moves, two fingers zoom.
  pointer() {
    const area = this.over, fingers = new Map();
    const place = (event) => {
      const box = area.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    area.addEventListener("pointerdown", (event) => {
      const [x, y] = place(event), found = this.hit(x, y);
      if (event.button !== 0) return;
      if (found && "toggle" in found) {
        if (!this.open.delete(found.toggle)) this.open.add(found.toggle);
        this.redraw();
        return;
      }
      area.setPointerCapture(event.pointerId);
      if (event.pointerType === "mouse") {
        if (x >= this.gutter) this.drag = { from: this.time(x), x };
      } else {
        fingers.set(event.pointerId, x);
      }
    });
    area.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (fingers.has(event.pointerId)) {
        this.touched(fingers, event.pointerId, x);
        return;
      }
      if (this.drag && Math.abs(x - this.drag.x) > 3) this.drag.to = this.time(Math.min(Math.max(x, this.gutter), this.gutter + this.width));
      this.hover(x, y);
    });
    const done = (event) => {
      const [x, y] = place(event), drag = this.drag;
      if (fingers.delete(event.pointerId)) { this.hover(x, y); return; }
      this.drag = null;
      if (drag && drag.to !== undefined) this.view(Math.min(drag.from, drag.to), Math.max(drag.from, drag.to));
    };
    area.addEventListener("pointerup", done);
    area.addEventListener("pointercancel", (event) => { fingers.delete(event.pointerId); this.drag = null; });
    area.addEventListener("pointerleave", () => { if (!this.drag) this.hide(); });
    area.addEventListener("dblclick", () => this.view(0, this.end));
    area.addEventListener("wheel", (event) => {
      const [x] = place(event), sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.time(x));
      else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.move(sideways / this.width);
      else return;
      event.preventDefault();
    }, { passive: false });
  }

  touched(fingers, id, x) {
    const others = [...fingers].filter(([other]) => other !== id), before = fingers.get(id);
    if (others.length) {
      const fixed = others[0][1], was = before - fixed, is = x - fixed;
      if (Math.abs(is) > 10 && was * is > 0) this.zoom(was / is, this.time(fixed));
    } else {
      this.move((before - x) / this.width);
    }
    fingers.set(id, x);
  }

  keys() {
    const act = {
      "+": () => this.zoom(1 / ZOOM), "=": () => this.zoom(1 / ZOOM), w: () => this.zoom(1 / ZOOM), ArrowUp: () => this.zoom(1 / ZOOM),
      "-": () => this.zoom(ZOOM), s: () => this.zoom(ZOOM), ArrowDown: () => this.zoom(ZOOM),
      ArrowLeft: () => this.move(-0.2), a: () => this.move(-0.2), ArrowRight: () => this.move(0.2), d: () => this.move(0.2),
      0: () => this.view(0, this.end), Home: () => this.view(0, this.end), Escape: () => this.hide(),
    };
    this.plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in act)) return;
      event.preventDefault();
      act[event.key]();
    });
  }
}

for (const root of document.querySelectorAll(".timeline")) {
  unpacked(root.querySelector("script").textContent).then(
    (found) => new Timeline(root, found),
    (error) => {
      root.querySelector(".plot").append(element("p", "notice", `The timeline cannot be shown: ${error.message}`));
      throw error;
    },
  );
}
