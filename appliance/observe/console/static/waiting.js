// Delayed records by due time, and transactions.
import { count, field, h, span, Table, time } from "./dom.js";
import { change, get, token } from "./store.js";
import { link } from "./overview.js";

export function delays() {
  const table = new Table([
    { title: "Topic" }, { title: "Partition", num: true }, { title: "Pending", num: true }, { title: "Within 1 min", num: true }, { title: "1 h", num: true }, { title: "1 d", num: true },
    { title: "Later", num: true }, { title: "Recurring", num: true }, { title: "Next due" }, { title: "Delivered", num: true }, { title: "Late by", num: true },
  ], { empty: "no topic has delayed records" });
  const name = h("input", { name: "topic", required: true });
  const said = h("p", { class: "said", role: "status" });
  const rows = new Table([{ title: "Due" }, { title: "Partition", num: true }, { title: "Key", class: "mono wide" }, { title: "Recurs" }, { title: "" }], { empty: "none" });
  const show = async () => {
    try {
      const found = await get("/api/delays", { topic: name.value });
      said.textContent = found.truncated ? "the first ones of many" : `${found.delays.length} records`;
      rows.fill(found.delays.map((d) => [d.delay_id, [
        time(d.due_ms), d.partition, d.key ?? "–", d.recurs ? "yes" : "no",
        h("button", { type: "button", disabled: !token.get(), async onclick() {
          try { await change("cancel-delay", { delay_id: d.delay_id }); await show(); } catch (error) { said.textContent = error.message; }
        } }, "Cancel"),
      ]]));
    } catch (error) { said.textContent = error.message; }
  };
  const list = h("form", { onsubmit(event) { event.preventDefault(); show(); } }, field("Pending records of topic", name), h("button", { class: "main", type: "submit" }, "Show"));
  return {
    elements: [h("h1", {}, "Delayed records"), table.element, list, said, rows.element],
    update(state) {
      table.fill(state.delays.map((d) => [`${d.topic}/${d.partition}`, [
        link("topics", d.topic), d.partition, count(d.pending), ...["1m", "1h", "1d", "later"].map((key) => count(d.due_within[key])), count(d.recurring),
        d.next_due_us ? time(d.next_due_us / 1000) : "–", count(d.delivered), `${Math.round(d.lateness_us / 1000)} ms`,
      ]]));
    },
  };
}

export function transactions() {
  const totals = h("p", { class: "soft" });
  const said = h("p", { class: "said", role: "status" });
  const table = new Table([
    { title: "Transactional id" }, { title: "State" }, { title: "Open for", num: true }, { title: "Timeout", num: true }, { title: "Client" }, { title: "" },
  ], { many: true, empty: "no transactional id" });
  const load = async () => {
    try {
      const found = await get("/api/transactions");
      table.fill(found.map((t) => [t.transactional_id, [
        t.transactional_id, t.state, t.open_ms ? span(t.open_ms / 1000) : "–", span(t.timeout_ms / 1000), t.client_id || "",
        t.open_ms ? h("button", { type: "button", disabled: !token.get(), async onclick() {
          if (!confirm(`Abort the transaction of ${t.transactional_id}?`)) return;
          try { said.textContent = (await change("abort-transaction", { transactional_id: t.transactional_id })).done; await load(); } catch (error) { said.textContent = error.message; }
        } }, "Abort") : "",
      ]]));
    } catch (error) { said.textContent = error.message; }
  };
  load();
  const timer = setInterval(load, 3000);
  return {
    elements: [h("h1", {}, "Transactions"), totals, said, table.element],
    update(state) {
      const t = state.transactions;
      totals.textContent = t.ids ? `${count(t.open)} open, the oldest for ${span(t.oldest_ms / 1000)}; ${count(t.commits)} commits, ${count(t.aborts)} aborts, ${count(t.fenced)} fenced` : "no transactional id has been used";
    },
    close() { clearInterval(timer); },
  };
}
