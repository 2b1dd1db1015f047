// Groups and queues: the list; one group with its members, offsets and lag over time.
import { Chart, count, h, span, Table, time } from "./dom.js";
import { change, get, token } from "./store.js";
import { form } from "./topics.js";
import { link } from "./overview.js";

const kind = (text) => (text === "share" ? "queue" : "consumer group");

export function groups() {
  const filter = h("input", { type: "search", "aria-label": "Filter groups", placeholder: "filter" });
  const table = new Table([
    { title: "Group" }, { title: "Kind" }, { title: "State" }, { title: "Members", num: true }, { title: "Lag", num: true }, { title: "Given up, not written", num: true },
  ], { many: true, empty: "no group" });
  let last = { groups: {} };
  const draw = () => {
    const names = Object.keys(last.groups).filter((name) => name.toLowerCase().includes(filter.value.toLowerCase())).sort();
    table.fill(names.map((name) => {
      const [type, status, members, lag, dead] = last.groups[name];
      return [name, [table.rows.get(name)?.values[0] || link("groups", name), kind(type), status.toLowerCase(), count(members), count(lag), count(dead)]];
    }));
  };
  filter.addEventListener("input", draw);
  return { elements: [h("h1", {}, "Groups and queues"), h("div", { class: "bar" }, filter), table.element], update(state) { last = state; draw(); } };
}

export function group(name) {
  const head = h("p", { class: "soft" }, "…");
  const trouble = h("p", { class: "bad-text", hidden: true });
  const lag = new Chart("Lag, records", count);
  const offsets = new Table([
    { title: "Topic" }, { title: "Partition", num: true }, { title: "Committed", num: true }, { title: "End", num: true }, { title: "Lag", num: true },
    { title: "Oldest waits", num: true }, { title: "Member" }, { title: "Last commit" },
  ], { many: true, empty: "no commit" });
  const members = new Table([
    { title: "Member" }, { title: "Client" }, { title: "State" }, { title: "Partitions", num: true }, { title: "Heartbeat", num: true }, { title: "Remark" },
  ], { empty: "no member" });
  const letters = h("p");
  const described = async () => {
    try {
      const found = await get("/api/group", { name });
      head.textContent = `${kind(found.kind)}, ${found.state.toLowerCase()}, ${found.member_count} members, ${found.rebalances} rebalances, assignor ${found.assignor || "none"}`;
      trouble.hidden = !found.trouble;
      trouble.textContent = found.trouble || "";
      offsets.fill(found.partitions.map((p) => [`${p.topic}/${p.partition}`, [
        link("topics", p.topic), p.partition, p.committed < 0 ? "–" : count(p.committed), count(p.end), count(p.lag), span(p.lag_seconds), (p.member_id || "–").slice(0, 12), time(p.committed_ms),
      ]]));
      members.fill(found.members.map((m) => [m.member_id, [
        m.instance_id || m.member_id.slice(0, 12), m.client_id, m.state.toLowerCase(), count(Object.values(m.owned || {}).flat().length), `${(m.last_heartbeat_ms_ago / 1000).toFixed(1)} s ago`, m.stuck || "",
      ]]));
      if (found.kind === "share") {
        const names = [...new Set(found.partitions.map((p) => p.topic))].map((text) => `${text}.dlq`);
        letters.replaceChildren("Dead letters: ", ...names.flatMap((text) => [link("topics", text), " "]));
      }
    } catch (error) {
      head.textContent = error.message;
      head.className = "bad-text";
    }
  };
  described();
  const timer = setInterval(described, 5000);
  const reset = form("Reset offsets", [["topic", "Topic", "text", true], ["to", "To", "text", true, ["earliest", "latest", "time"]], ["time", "Time (2027-01-31T08:00Z)", "text"]], (v) =>
    change("reset-group", { group: name, topic: v.topic, to: v.to, ...(v.to === "time" ? { time_ms: Date.parse(v.time) } : {}) }));
  const redrive = form("Send dead letters again", [["topic", "Dead-letter topic", "text", true]], (v) => change("redrive", { topic: v.topic }));
  const remove = h("button", {
    type: "button", disabled: !token.get(),
    async onclick() {
      if (!confirm(`Delete group ${name} with its committed offsets?`)) return;
      try { await change("delete-group", { group: name }); location.hash = "#/groups"; } catch (error) { trouble.hidden = false; trouble.textContent = error.message; }
    },
  }, "Delete the group");
  return {
    elements: [h("h1", {}, name), head, trouble, lag.element, h("h2", {}, "Offsets"), offsets.element, letters, h("h2", {}, "Members"), members.element, h("h2", {}, "Changes"), reset, redrive, remove],
    update(state) { lag.draw(state.lags[name] || []); },
    close() { clearInterval(timer); },
  };
}
