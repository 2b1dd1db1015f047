// The overview, and the processes.
import { bytes, Chart, count, duration, h, rate, Table } from "./dom.js";

function card(title) {
  const value = h("b", {}, "–");
  const element = h("div", { class: "card" }, value, h("span", {}, title));
  return {
    element,
    set(text, bad = false) {
      if (value.textContent !== text) value.textContent = text;
      element.classList.toggle("bad", bad);
    },
  };
}

export function overview() {
  const cards = {
    rate: card("records in, a second"), topics: card("topics"), size: card("stored"), lag: card("records behind, all groups"),
    groups: card("groups and queues with members"), delays: card("delayed records pending"), open: card("open transactions"), free: card("free on the fullest disk"),
  };
  const throughput = new Chart("Records in", rate);
  const stored = new Chart("Stored", bytes);
  const latencies = Object.entries({
    produce: "Produce", delivery: "Delivery", fetch: "Fetch", sync: "Sync",
  }).map(([name, title]) => [name, new Chart(title, duration, ["p50", "p99"])]);
  const busy = new Table([{ title: "Busiest topics" }, { title: "Records in", num: true }, { title: "Stored", num: true }], { empty: "nothing is being written" });
  const behind = new Table([{ title: "Groups furthest behind" }, { title: "Lag", num: true }, { title: "Members", num: true }], { empty: "no group is behind" });
  const update = (state) => {
    const groups = Object.entries(state.groups);
    cards.rate.set(rate(state.rate));
    cards.topics.set(count(state.topic_count));
    cards.size.set(bytes(state.size_bytes));
    cards.lag.set(count(groups.reduce((sum, [, g]) => sum + (g[3] || 0), 0)));
    cards.groups.set(count(groups.filter(([, g]) => g[2] > 0).length));
    cards.delays.set(count(state.delays.reduce((sum, d) => sum + d.pending, 0)));
    cards.open.set(count(state.transactions.open || 0), (state.transactions.oldest_ms || 0) > 60000);
    const free = Math.min(...(state.cluster.data_dirs || []).map((row) => row.free_bytes));
    cards.free.set(Number.isFinite(free) ? bytes(free) : "–", (state.cluster.data_dirs || []).some((row) => row.state !== "OK"));
    throughput.draw(state.history.map(([t, value]) => [t, value]));
    stored.draw(state.history.map(([t, , value]) => [t, value]));
    for (const [name, chart] of latencies) {
      chart.draw(state.latencies.filter(([, found]) => found[name]).map(([t, found]) => [t, ...found[name]]));
    }
    const rates = Object.entries(state.topics).filter(([, row]) => row[5] > 0).sort((a, b) => b[1][5] - a[1][5]).slice(0, 8);
    busy.fill(rates.map(([name, row]) => [name, [link("topics", name), rate(row[5]), bytes(row[2])]]));
    const late = groups.filter(([, g]) => g[3] > 0).sort((a, b) => b[1][3] - a[1][3]).slice(0, 8);
    behind.fill(late.map(([name, g]) => [name, [link("groups", name), count(g[3]), count(g[2])]]));
  };
  return {
    elements: [
      h("h1", {}, "Overview"), h("div", { class: "cards" }, Object.values(cards).map((c) => c.element)),
      h("h2", {}, "The last minutes"), h("div", { class: "cards" }, throughput.element, stored.element),
      h("h2", {}, "Latency, over ten seconds each"), h("div", { class: "cards" }, latencies.map(([, chart]) => chart.element)),
      h("div", { class: "cards" }, h("div", {}, h("h2", {}, "Topics"), busy.element), h("div", {}, h("h2", {}, "Groups"), behind.element)),
    ],
    update,
  };
}

export function link(section, name) {
  return h("a", { href: `#/${section}/${encodeURIComponent(name)}` }, name);
}

export function processes() {
  const table = new Table([
    { title: "Process" }, { title: "State" }, { title: "Core" }, { title: "Restarts", num: true }, { title: "Errors", num: true }, { title: "Memory", num: true },
  ]);
  const disks = new Table([{ title: "Data directory" }, { title: "Free", num: true }, { title: "Size", num: true }, { title: "State" }]);
  const update = (state) => {
    table.fill(state.processes.map((row) => [row.name, [
      row.name, h("span", { class: row.live && row.ready ? null : "bad-text" }, row.live ? (row.ready ? "serves" : "starting") : "down"),
      row.cores, count(row.restarts), count(row.errors), bytes(row.resident_bytes),
    ]]));
    disks.fill((state.cluster.data_dirs || []).map((row) => [row.path, [
      row.path, bytes(row.free_bytes), bytes(row.total_bytes), h("span", { class: row.state === "OK" ? null : "bad-text" }, row.state),
    ]]));
  };
  return { elements: [h("h1", {}, "Processes"), table.element, h("h2", {}, "Data directories"), disks.element], update };
}
