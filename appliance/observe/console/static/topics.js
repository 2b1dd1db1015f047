// Topics: the list; one topic with its partitions, records, settings, and changes.
import { bytes, count, field, h, rate, Table, time } from "./dom.js";
import { change, get, token } from "./store.js";
import { link } from "./overview.js";

const INTERNAL = /^__/;

export function topics() {
  const filter = h("input", { type: "search", "aria-label": "Filter topics", placeholder: "filter" });
  const all = h("input", { type: "checkbox" });
  const table = new Table([
    { title: "Topic" }, { title: "Partitions", num: true }, { title: "Records", num: true }, { title: "Stored", num: true },
    { title: "Segments", num: true }, { title: "Records in", num: true }, { title: "State" },
  ], { many: true, empty: "no topic" });
  let shown = "";
  const update = (state) => {
    const word = filter.value.toLowerCase();
    const names = Object.keys(state.topics).filter((name) => name.toLowerCase().includes(word) && (all.checked || !INTERNAL.test(name))).sort();
    const row = (name) => {
      const [partitions, records, size, segments, offline, speed] = state.topics[name];
      return [count(partitions), count(records), bytes(size), count(segments), rate(speed), offline ? `${offline} offline` : "online"];
    };
    if (names.join("\n") !== shown) {
      shown = names.join("\n");
      table.fill(names.map((name) => [name, [table.rows.get(name)?.values[0] || link("topics", name), ...row(name)]]));
      return;
    }
    for (const name of names) table.set(name, [table.rows.get(name).values[0], ...row(name)]);
  };
  filter.addEventListener("input", () => update(last));
  all.addEventListener("change", () => update(last));
  let last = { topics: {} };
  const create = form("Create a topic", [["name", "Name", "text", true], ["partitions", "Partitions", "number"]], (values) =>
    change("create-topic", { name: values.name, ...(values.partitions ? { partitions: Number(values.partitions) } : {}) }));
  return {
    elements: [h("h1", {}, "Topics"), h("div", { class: "bar" }, filter, h("label", {}, h("span", {}, all, " internal topics"))), table.element, create],
    update(state) { last = state; update(state); },
  };
}

// A form for a change; it is disabled without the token.
export function form(title, fields, send) {
  const said = h("p", { class: "said", role: "status" });
  const inputs = fields.map(([name, label, type, required, options]) => {
    const input = options
      ? h("select", { name, required }, options.map((text) => h("option", {}, text)))
      : h(type === "area" ? "textarea" : "input", { name, type: type === "area" ? null : type, required });
    return field(label, input);
  });
  const button = h("button", { class: "main", type: "submit", disabled: !token.get() }, title);
  const element = h("form", {
    async onsubmit(event) {
      event.preventDefault();
      button.disabled = true;
      said.className = "said";
      try {
        const answer = await send(Object.fromEntries(new FormData(element)));
        said.textContent = answer.done || "done";
      } catch (error) {
        said.className = "said bad-text";
        said.textContent = error.message;
      }
      button.disabled = false;
    },
  }, inputs, button);
  const note = token.get() ? null : h("p", { class: "soft" }, "Read only: run `tailrace console` on the host for an address that allows changes.");
  return h("details", {}, h("summary", {}, title), element, note, said);
}

export function topic(name) {
  const head = h("p", { class: "soft" }, "…");
  const partitions = new Table([
    { title: "Partition", num: true }, { title: "First", num: true }, { title: "End", num: true }, { title: "Records", num: true },
    { title: "Stored", num: true }, { title: "Segments", num: true }, { title: "Newest record" }, { title: "Epoch", num: true }, { title: "State" },
  ]);
  const settings = new Table([{ title: "Setting", class: "mono" }, { title: "Value", class: "mono" }]);
  const schema = h("pre");
  const described = async () => {
    try {
      const found = await get("/api/topic", { name });
      head.textContent = `${found.typed ? "typed topic" : "topic"}, id ${found.topic_id}, created ${found.created.slice(0, 19).replace("T", " ")}`;
      partitions.fill(found.partitions.map((p) => [p.partition, [
        p.partition, count(p.beginning_offset), count(p.end_offset), count(p.records), bytes(p.bytes), count(p.segments), time(p.newest_timestamp), p.leader_epoch, p.state,
      ]]));
      settings.fill(Object.entries(found.configs).map(([key, value]) => [key, [key, String(value)]]));
      schema.textContent = found.schema;
    } catch (error) {
      head.textContent = error.message;
      head.className = "bad-text";
    }
  };
  described();
  const timer = setInterval(described, 5000);
  const produce = form("Produce one record", [["key", "Key", "text"], ["value", "Value", "area", true], ["partition", "Partition (or by key)", "number"]], (v) =>
    change("produce", { topic: name, value: v.value, ...(v.key ? { key: v.key } : {}), ...(v.partition ? { partition: Number(v.partition) } : {}) }));
  const alter = form("Change a setting", [["setting", "Setting", "text", true], ["value", "Value", "text", true]], (v) =>
    change("alter-topic", { name, configs: { [v.setting]: v.value } }));
  const grow = form("Add partitions", [["partitions", "New number of partitions", "number", true]], (v) =>
    change("alter-topic", { name, partitions: Number(v.partitions) }));
  return {
    elements: [
      h("h1", {}, name), head, partitions.element, h("h2", {}, "Records"), ...browser(name), h("h2", {}, "Changes"), produce, alter, grow,
      h("h2", {}, "Settings"), settings.element, h("h2", {}, "Columns"), schema,
    ],
    close() { clearInterval(timer); },
  };
}

function text(value, format) {
  if (value === null) return h("span", { class: "soft" }, "null");
  const [kind, raw] = Object.entries(value)[0];
  let shown = raw;
  if (format === "JSON" && (kind === "text" || kind === "json")) {
    try { shown = JSON.stringify(JSON.parse(raw), null, 1); } catch { /* it is text */ }
  }
  const note = value.size ? ` … (${count(value.size)} in all)` : kind === "base64" ? " (base64)" : "";
  return h("span", {}, shown, note ? h("span", { class: "soft" }, note) : null);
}

function browser(name) {
  const from = h("select", { name: "from" }, ["newest", "offset", "time", "beginning"].map((word) => h("option", {}, word)));
  const at = h("input", { name: "at", placeholder: "12345, or 2027-01-31T08:00Z" });
  const partition = h("input", { name: "partition", type: "number", min: "0", value: "0" });
  const search = h("input", { name: "search", placeholder: "text in key, value, headers" });
  const format = h("select", { name: "format" }, ["text", "JSON", "columns"].map((word) => h("option", {}, word)));
  const said = h("p", { class: "said soft", role: "status" });
  const table = h("div");
  const more = h("button", { type: "button", hidden: true }, "More");
  let found = null;
  const draw = () => {
    if (!found) return;
    const columns = format.value === "columns" ? keys(found.records) : null;
    const shown = new Table([
      { title: "Offset", num: true }, { title: "Time" }, { title: "Key", class: "mono wide" },
      ...(columns || ["Value"]).map((title) => ({ title, class: "mono wide" })), { title: "Headers", class: "mono wide" },
    ], { many: true, empty: "no record here" });
    shown.fill(found.records.map((r) => [r.offset, [
      r.offset, time(r.timestamp_ms), text(r.key, "text"),
      ...(columns ? columns.map((column) => cell(r.value, column)) : [text(r.value, format.value)]),
      r.headers.map(([key, value]) => `${key}=${value === null ? "" : Object.values(value)[0]}`).join(" "),
    ]]));
    table.replaceChildren(shown.element);
  };
  const load = async (query) => {
    said.className = "said soft";
    said.textContent = "reading";
    try {
      found = await get("/api/records", { topic: name, partition: partition.value, search: search.value, ...query });
      said.textContent = `${count(found.records.length)} records; the partition has offsets ${count(found.beginning)} to ${count(found.end)}`;
      more.hidden = found.next >= found.end;
      draw();
    } catch (error) {
      said.className = "said bad-text";
      said.textContent = error.message;
    }
  };
  const begin = () => {
    if (from.value === "offset") return load({ offset: at.value || "0" });
    if (from.value === "beginning") return load({ offset: "0" });
    if (from.value !== "time") return load({});
    const ms = Date.parse(at.value);
    if (Number.isNaN(ms)) { said.className = "said bad-text"; said.textContent = "write a time such as 2027-01-31T08:00Z"; return null; }
    return load({ time_ms: String(ms) });
  };
  more.addEventListener("click", () => load({ offset: String(found.next) }));
  format.addEventListener("change", draw);
  begin();
  const bar = h("form", { onsubmit(event) { event.preventDefault(); begin(); } },
    field("Partition", partition), field("From", from), field("At", at), field("Search", search), field("As", format),
    h("button", { class: "main", type: "submit" }, "Show"));
  return [bar, said, table, more];
}

function parsed(value) {
  if (value === null) return null;
  try { return JSON.parse(value.json ?? value.text); } catch { return null; }
}

function keys(records) {
  const names = new Set();
  for (const record of records) for (const name of Object.keys(Object(parsed(record.value)))) names.add(name);
  return names.size ? [...names].slice(0, 30) : ["value"];
}

function cell(value, column) {
  const object = parsed(value);
  if (object === null || typeof object !== "object") return column === "value" && value ? Object.values(value)[0] : "";
  const found = object[column];
  return found === undefined ? "" : typeof found === "object" ? JSON.stringify(found) : String(found);
}
