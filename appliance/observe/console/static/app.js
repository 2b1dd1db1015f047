// The frame: sections by the address's fragment, keys, the link to the appliance, the token.
import { h } from "./dom.js";
import { connect, link, login, loginAs, state, subscribe, token } from "./store.js";
import { overview, processes } from "./overview.js";
import { topic, topics } from "./topics.js";
import { group, groups } from "./groups.js";
import { delays, transactions } from "./waiting.js";
import { sql } from "./sql.js";

const SECTIONS = [
  ["", "Overview", "o", overview], ["topics", "Topics", "t", topics], ["groups", "Groups and queues", "g", groups],
  ["delays", "Delays", "d", delays], ["transactions", "Transactions", "x", transactions],
  ["processes", "Processes", "p", processes], ["sql", "SQL", "s", sql],
];
const DETAILS = { topics: topic, groups: group };
const main = document.getElementById("main");
let leave = () => {};

function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  token.set(found[1]);
  history.replaceState(null, "", "#/");
}

function route() {
  takeToken();
  const [section = "", name = ""] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const known = SECTIONS.find((row) => row[0] === section) || SECTIONS[0];
  const make = name && DETAILS[section] ? DETAILS[section] : known[3];
  leave();
  const view = make(name);
  main.replaceChildren(...view.elements);
  const stop = view.update ? subscribe(view.update) : () => {};
  if (view.update) view.update(state);
  leave = () => { stop(); if (view.close) view.close(); };
  document.title = `${name || known[1]} · Tailrace`;
  for (const item of document.querySelectorAll("nav a")) {
    if (item.dataset.section === known[0]) item.setAttribute("aria-current", "page");
    else item.removeAttribute("aria-current");
  }
  showAccess();
}

function showAccess() {
  const button = document.getElementById("access");
  button.textContent = token.get() ? "Changes allowed" : "Read only";
  button.title = token.get() ? "Forget the token" : "Enter the token that `tailrace console` prints";
}

document.getElementById("access").addEventListener("click", () => {
  const given = token.get() ? "" : prompt("Token (tailrace console prints an address with it)");
  if (given === null) return;
  token.set(given.trim());
  if (link.status !== "live" && given) login().then(connect, () => {});
  route();
});

document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target, told = form.querySelector("[role=alert]");
  told.textContent = "";
  try {
    await loginAs(form.user.value, form.password.value);
    form.password.value = "";
    connect();
    route();
  } catch (error) { told.textContent = error.message; }
});

document.getElementById("nav").append(...SECTIONS.map(([section, title]) => h("a", { href: `#/${section}`, "data-section": section }, title)));

subscribe(() => {
  const status = document.getElementById("link");
  status.className = link.status;
  document.getElementById("login").hidden = link.status !== "login";
  const text = { live: "live", login: "please log in" }[link.status] || "no connection, trying again";
  if (status.textContent !== text) status.textContent = text;
  const alert = document.getElementById("alert");
  const offline = state.cluster.offline_count || 0;
  const full = (state.cluster.data_dirs || []).filter((row) => row.state !== "OK");
  const words = [
    state.error && `No front answers: ${state.error}`,
    ...full.map((row) => `${row.path} takes no writes: ${row.state}. Free space there; tailrace status says how.`),
    offline && `${offline} partitions take no writes; tailrace status names them.`,
    ...state.processes.filter((row) => !row.live).map((row) => `${row.name} is down; it is started again.`),
  ].filter(Boolean);
  alert.hidden = words.length === 0;
  if (alert.textContent !== words.join(" ")) alert.textContent = words.join(" ");
  document.getElementById("identity").textContent = state.cluster.cluster_id ? `appliance ${state.cluster.cluster_id}` : "";
});

let prefix = 0;
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    const filter = main.querySelector("input[type=search]");
    if (filter) { filter.focus(); event.preventDefault(); }
    return;
  }
  if (event.key === "g" && Date.now() - prefix > 1000) { prefix = Date.now(); return; }
  const found = Date.now() - prefix <= 1000 && SECTIONS.find((row) => row[2] === event.key);
  prefix = 0;
  if (found) { location.hash = `#/${found[0]}`; main.focus(); }
});

addEventListener("hashchange", route);
route();
connect();
