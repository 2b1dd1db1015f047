// Elements of the page. Text of the log becomes a text node here, and never markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function field(label, control) {
  return h("label", {}, label, control);
}

export const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export const rate = (value) => `${value < 10 && value > 0 ? value.toFixed(1) : count(value)}/s`;

export function duration(seconds) {
  const [value, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(2)} ${unit}`;
}

export function time(ms) {
  return ms > 0 ? new Date(ms).toISOString().replace("T", " ").replace("Z", "") : "–";
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

// A table whose rows are kept by key: an update changes only the cells that differ.
export class Table {
  constructor(columns, { many = false, empty = "none" } = {}) {
    this.columns = columns;
    this.rows = new Map();
    this.empty = h("p", { class: "soft" }, empty);
    this.body = h("tbody");
    const head = columns.map((c) => h("th", { class: c.num ? "num" : null, scope: "col" }, c.title));
    this.table = h("table", { class: many ? "rows-many" : null }, h("thead", {}, h("tr", {}, head)), this.body);
    this.element = h("div", {}, h("div", { class: "scroll", tabindex: "0", role: "group" }, this.table), this.empty);
    this.show();
  }

  show() {
    this.empty.hidden = this.rows.size > 0;
    this.table.parentElement.hidden = this.rows.size === 0;
  }

  set(key, values) {
    let row = this.rows.get(key);
    if (!row) {
      const cells = this.columns.map((c) => h("td", { class: c.num ? "num" : c.class || null }));
      row = { element: h("tr", {}, cells), cells, values: [] };
      this.rows.set(key, row);
      this.body.append(row.element);
    }
    values.forEach((value, place) => {
      if (row.values[place] === value) return;
      row.values[place] = value;
      row.cells[place].replaceChildren(value instanceof Node ? value : String(value ?? "–"));
    });
    return row;
  }

  // Replaces all rows: [[key, values], ...] in this order.
  fill(entries) {
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    let before = null;
    for (const [key, values] of entries) {
      const { element } = this.set(key, values);
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== element) this.body.insertBefore(element, place);
      before = element;
    }
    this.show();
  }
}

// A line over time; `points` are [milliseconds, value, ...]. With `names` of several values each has
// its line, and the area is below the last.
export class Chart {
  constructor(title, format, names = [""]) {
    this.format = format;
    this.names = names;
    this.value = h("b");
    this.top = h("span");
    const ns = "http://www.w3.org/2000/svg";
    this.svg = document.createElementNS(ns, "svg");
    for (const [name, value] of [["viewBox", "0 0 300 100"], ["preserveAspectRatio", "none"], ["class", "chart"], ["role", "img"]]) this.svg.setAttribute(name, value);
    [this.area, ...this.lines] = ["area", ...names.map((_, number) => (number ? "line" : names.length > 1 ? "line faint" : "line"))].map((kind) => {
      const path = document.createElementNS(ns, "path");
      path.setAttribute("class", kind);
      this.svg.append(path);
      return path;
    });
    this.title = title;
    this.element = h("figure", { class: "card" }, h("figcaption", {}, h("span", {}, title), this.top), this.svg);
  }

  draw(points) {
    const top = this.names.length;
    const most = Math.max(top > 1 ? 1e-6 : 1, ...points.map((point) => point[top]));
    const last = points.length ? points[points.length - 1] : this.names.map(() => 0).concat(0);
    const now = points.length || top === 1 ? this.names.map((name, number) => `${name} ${this.format(last[number + 1])}`.trim()).join(", ") : "nothing yet";
    const text = top > 1 ? now : `now ${now}, most ${this.format(most)}`;
    this.top.textContent = text;
    this.svg.setAttribute("aria-label", `${this.title}: ${text}`);
    if (points.length < 2) return;
    const first = points[0][0], wide = points[points.length - 1][0] - first || 1;
    this.lines.forEach((line, number) => {
      const at = points.map((point) => `${(((point[0] - first) / wide) * 300).toFixed(1)},${(98 - (point[number + 1] / most) * 92).toFixed(1)}`);
      line.setAttribute("d", `M${at.join("L")}`);
      if (number === top - 1) this.area.setAttribute("d", `M0,100L${at.join("L")}L300,100Z`);
    });
  }
}
