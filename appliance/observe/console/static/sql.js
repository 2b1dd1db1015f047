// SQL over the topics, read only.
import { count, h, Table } from "./dom.js";
import { post } from "./store.js";

let kept = "";

export function sql() {
  const query = h("textarea", { name: "query", "aria-label": "Query", spellcheck: "false", placeholder: "select partition, count(*) from orders group by 1" });
  query.value = kept;
  const said = h("p", { class: "said", role: "status" });
  const result = h("div");
  const button = h("button", { class: "main", type: "submit" }, "Run");
  const run = async () => {
    kept = query.value;
    button.disabled = true;
    said.className = "said soft";
    said.textContent = "running";
    const begin = performance.now();
    try {
      const { rows, truncated } = await post("/api/sql", { query: query.value });
      const names = rows.length ? Object.keys(rows[0]) : [];
      const table = new Table(names.map((title) => ({ title, num: rows.every((row) => row[title] === null || typeof row[title] === "number"), class: "mono wide" })), { many: true, empty: "no row" });
      table.fill(rows.map((row, number) => [number, names.map((name) => (typeof row[name] === "object" && row[name] !== null ? JSON.stringify(row[name]) : row[name] ?? "NULL"))]));
      result.replaceChildren(table.element);
      said.textContent = `${count(rows.length)} rows${truncated ? " (the first ones; select less)" : ""}, ${((performance.now() - begin) / 1000).toFixed(2)} s`;
    } catch (error) {
      said.className = "said bad-text";
      said.textContent = error.message;
    }
    button.disabled = false;
  };
  const form = h("form", { onsubmit(event) { event.preventDefault(); run(); } }, query, button, h("span", { class: "soft" }, "Ctrl+Enter runs it. Topics are tables; decode(value) is a value's text."));
  query.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } });
  return { elements: [h("h1", {}, "SQL"), form, said, result] };
}
