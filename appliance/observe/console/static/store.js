// The state that the appliance streams, and requests to it.

export const state = { topics: {}, groups: {}, processes: [], history: [], latencies: [], lags: {}, cluster: {}, delays: [], transactions: {}, error: "", rate: 0, size_bytes: 0 };
const HISTORY = 300;
const listeners = new Set();
let source = null;
let polling = 0;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  for (const listener of listeners) listener(state);
}

export const link = { status: "", set(status) { link.status = status; changed(); } };

function take(message, whole) {
  const { topics, gone = [], lags, history, latencies, ...rest } = message;
  Object.assign(state, rest);
  if (whole) {
    state.topics = topics;
    state.history = history;
    state.latencies = latencies;
    state.lags = lags;
    return;
  }
  Object.assign(state.topics, topics);
  for (const name of gone) delete state.topics[name];
  state.history.push([message.time_ms, message.rate, message.size_bytes]);
  if (state.history.length > HISTORY) state.history.shift();
  state.latencies.push([message.time_ms, message.latency]);
  if (state.latencies.length > HISTORY) state.latencies.shift();
  for (const [name, group] of Object.entries(message.groups)) {
    if (group[3] === null) continue;
    const points = (state.lags[name] ||= []);
    if (points.length && message.time_ms - points[points.length - 1][0] < 4000) continue;
    points.push([message.time_ms, group[3]]);
    if (points.length > HISTORY) points.shift();
  }
}

export function connect() {
  source = new EventSource("/api/events");
  source.addEventListener("state", (event) => { take(JSON.parse(event.data), true); link.set("live"); });
  source.addEventListener("tick", (event) => { take(JSON.parse(event.data), false); link.set("live"); });
  source.addEventListener("error", () => {
    link.set("lost");
    if (source.readyState !== EventSource.CLOSED) return;
    if (token.get() && !hasLoggedIn) login().then(connect, poll);
    else poll();  // the appliance has no stream left, or wants a login
  });
}

let hasLoggedIn = false;

// An appliance that requires users takes the token, or a user's password, for a session's cookie.
export async function login() {
  hasLoggedIn = true;
  await answer(await fetch("/api/login", { method: "POST", headers: { Authorization: `Bearer ${token.get()}` } }));
}

export async function loginAs(name, password) {
  const bytes = new TextEncoder().encode(`${name}:${password}`);
  const given = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  const found = await answer(await fetch("/api/login", { method: "POST", headers: { Authorization: `Basic ${given}` } }));
  hasLoggedIn = true;
  token.set(found.token);
}

async function look() {
  try { take(await get("/api/state"), true); link.set("live"); } catch (error) { link.set(error.status === 401 ? "login" : "lost"); }
}

function poll() {
  if (polling) return;
  polling = setInterval(look, 5000);
  look();
}

async function answer(response) {
  const text = await response.text();
  let body;
  try { body = JSON.parse(text); } catch { body = { error: text.slice(0, 300) || response.statusText }; }
  if (!response.ok) throw Object.assign(new Error(body.error || response.statusText), { status: response.status });
  return body;
}

export const get = async (path, query = {}) => {
  const words = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(words).toString();
  return answer(await fetch(text ? `${path}?${text}` : path));
};

export const token = {
  get: () => sessionStorage.getItem("token") || "",
  set: (value) => sessionStorage.setItem("token", value),
};

export const post = async (path, request) => {
  const headers = { "Content-Type": "application/json" };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(request) }));
};

export const change = (name, request) => post(`/api/change/${name}`, request);
