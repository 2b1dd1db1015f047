"""The console's page of a real appliance: over HTTP, and in a real browser."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import os
import pathlib
import shutil
import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from appliance.observe.console.access.token import read_token
from appliance.observe.open_connections import STREAMS_MAX
from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.kit.transactional.visibility import await_visible

SCRIPT = "<img src=x onerror=\"document.title='taken'\">"
CHROMIUM = shutil.which("chromium")
IMAGES = pathlib.Path(__file__).parents[3] / "docs" / "images"


class Page:
    """The page as a program asks for it."""

    def __init__(self, appliance: EmbeddedAppliance) -> None:
        self.address = console_of(appliance)
        self.netloc = urllib.parse.urlsplit(self.address).netloc
        self.ask("GET", "/")  # the token is made with the first request
        with Admin(appliance.address) as admin:
            directory = admin.describe_cluster()["data_dirs"][0]["path"]
        self.token = read_token(directory) or ""
        assert self.token

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        connection = http.client.HTTPConnection(self.netloc, timeout=HANG_LIMIT_S)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def get(self, path: str, **query: Any) -> Any:
        text = urllib.parse.urlencode(query)
        status, _, body = self.ask("GET", f"{path}?{text}" if text else path)
        return json.loads(body) if status == 200 else (status, json.loads(body))

    def change(self, change: str, /, **request: Any) -> Any:
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.token}",
        }
        status, _, body = self.ask("POST", f"/api/change/{change}", request, **headers)
        return json.loads(body) if status == 200 else (status, json.loads(body))


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"http.listen": "127.0.0.1:0"})
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics(
                [
                    NewTopic("orders", 1),
                    NewTopic("later", 1, {"delay.enabled": True}),
                ]
            )
            for number in range(100):
                producer.send("orders", b"v%d" % number, key=b"k", headers=[("h", b"x")])
            producer.send("orders", SCRIPT.encode(), key=SCRIPT.encode())
            producer.send("orders", b"\xff\xfe", key=b"binary")
            producer.send("orders", None, key=b"gone")
            producer.send("orders", b"a" * 100_000, key=b"large")
            producer.send("later", b"x", key=b"u1", deliver_after=dt.timedelta(days=1)).result(60)
            frame = pa.table({"carrier": ["UA", "AA"], "delay": [1, 2]})
            producer.send_arrow("flights", frame).result(60)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def page(appliance: EmbeddedAppliance) -> Page:
    return Page(appliance)


def test_every_answer_forbids_scripts_of_others_and_frames(page: Page) -> None:
    for path in ("/", "/static/app.js", "/api/state", "/api/nothing", "/static/../site.py"):
        _, headers, _ = page.ask("GET", path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert page.ask("GET", "/static/../site.py")[0] == 404
    assert page.ask("GET", "/static/%2e%2e/site.py")[0] == 404


def test_the_whole_page_is_below_100_kilobytes(page: Page) -> None:
    status, _, index = page.ask("GET", "/")
    assert status == 200
    names = ("app", "dom", "store", "overview", "topics", "groups", "waiting", "sql")
    files = [f"{name}.js" for name in names] + ["console.css", "icon.svg"]
    sizes = [len(page.ask("GET", f"/static/{name}")[2]) for name in files]
    assert all(sizes)
    assert len(index) + sum(sizes) < 100_000


def test_the_state_has_topics_processes_and_delays(page: Page) -> None:
    state = page.get("/api/state")
    assert state["error"] == ""
    assert state["topics"]["orders"][:2] == [1, 104]
    assert {row["name"] for row in state["processes"]} >= {"front-0", "worker-0", "console"}
    assert all(row["cores"] for row in state["processes"] if row["live"])
    # The scheduler has its own pace: it reads what the log acknowledged.
    wait_until(
        lambda: sum(row["pending"] for row in page.get("/api/state")["delays"]) == 1,
        "the delay is known",
    )


def test_records_are_found_by_offset_time_and_text_and_long_ones_are_cut(page: Page) -> None:
    found = page.get("/api/records", topic="orders", offset=98, limit=4)
    assert [row["offset"] for row in found["records"]] == [98, 99, 100, 101]
    assert found["records"][2]["value"] == {"text": SCRIPT}
    assert found["records"][3]["value"] == {"base64": "//4="}
    assert (found["next"], found["end"]) == (102, 104)
    newest = page.get("/api/records", topic="orders", limit=2)["records"]
    assert newest[0]["value"] is None
    assert len(newest[1]["value"]["text"]) < 20_000
    assert newest[1]["value"]["size"] == 100_000
    assert [
        r["offset"] for r in page.get("/api/records", topic="orders", search="v77")["records"]
    ] == [77]
    first = page.get("/api/records", topic="orders", time_ms=1, limit=1)["records"]
    assert first[0]["offset"] == 0
    rows = page.get("/api/records", topic="flights")["records"]
    assert json.loads(rows[1]["value"]["json"]) == {"carrier": "AA", "delay": 2}


@pytest.mark.parametrize(
    ("path", "query", "status", "words"),
    [
        ("/api/records", {}, 400, "topic is missing"),
        ("/api/records", {"topic": "orders", "offset": "x"}, 400, "offset is 'x'"),
        ("/api/records", {"topic": "orders", "offset": "9" * 30}, 400, "write a number"),
        ("/api/records", {"topic": "orders", "partition": "7"}, 400, "partition"),
        ("/api/records", {"topic": "nothing"}, 404, "no topic"),
        ("/api/topic", {"name": "nothing"}, 404, "no topic"),
        ("/api/group", {"name": "nothing"}, 404, "no group"),
        ("/api/delays", {"topic": "orders"}, 400, "delay.enabled"),
        ("/api/nothing", {}, 404, "there is no"),
    ],
)
def test_a_wrong_request_is_answered_with_a_sentence(
    page: Page, path: str, query: dict[str, str], status: int, words: str
) -> None:
    answered, body = page.get(path, **query)
    assert answered == status
    assert words in body["error"]


@pytest.mark.slow_because("each query is a process that imports DuckDB")
def test_sql_reads_topics_alone_and_within_limits(page: Page, tmp_path: pathlib.Path) -> None:
    def ask(query: str) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        status, _, body = page.ask("POST", "/api/sql", {"query": query}, **headers)
        return status, json.loads(body)

    assert ask("select count(*) n from orders") == (200, {"rows": [{"n": 104}], "truncated": False})
    status, many = ask("select * from range(5000)")
    assert (status, len(many["rows"]), many["truncated"]) == (200, 1000, True)
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    for query in (
        f"select * from read_csv('{secret}')",
        f"select * from '{secret}'",
        f"copy (select 1) to '{tmp_path}/out.csv'",
        "set memory_limit = '100GB'",
        "create table t as select 1",
        "select 1; select 2",
        "",
    ):
        status, body = ask(query)
        assert status in (400, 404), query
        assert body["error"]
    assert not (tmp_path / "out.csv").exists()


def test_changes_need_the_token_and_a_known_origin_and_are_checked_by_field(page: Page) -> None:
    plain = {"Content-Type": "application/json"}
    allowed = {**plain, "Authorization": f"Bearer {page.token}"}
    body = {"topic": "orders", "value": "x"}
    path = "/api/change/produce"
    assert page.ask("POST", path, body, **plain)[0] == 401
    assert page.ask("POST", path, body, **{**plain, "Authorization": "Bearer x"})[0] == 403
    assert page.ask("POST", path, body, **allowed, Origin="http://evil.example")[0] == 403
    assert page.ask("POST", path, body, **allowed, Host="evil.example")[0] == 421
    assert page.ask("POST", path, b"{", **allowed)[0] == 400
    assert page.ask("POST", path, b"[]", **allowed)[0] == 400
    assert page.ask("POST", path, body, Authorization=allowed["Authorization"])[0] == 400
    assert page.ask("POST", "/api/change/nothing", body, **allowed)[0] == 404
    assert page.ask("POST", "/", body, **allowed)[0] == 405
    status, answer = page.change("produce", topic="orders", value=7)
    assert (status, answer["code"]) == (400, "INVALID_REQUEST")
    status, answer = page.change("produce", topic="orders", other=7)
    assert "unknown field 'other'" in answer["error"]
    status, _ = page.change("create-topic", name="bad name")
    assert status == 400


def test_topics_records_groups_and_delays_are_changed(
    page: Page, appliance: EmbeddedAppliance
) -> None:
    assert page.change("create-topic", name="made", partitions=2)["done"]
    assert page.change("produce", topic="made", value="v", key="k", partition=1) == {
        "done": "partition 1, offset 0"
    }
    assert page.change("alter-topic", name="made", configs={"retention.ms": 60_000}, partitions=3)
    found = page.get("/api/topic", name="made")
    assert (len(found["partitions"]), found["configs"]["retention.ms"]) == (3, 60_000)
    with Consumer(
        "made", bootstrap=appliance.address, group_id="readers", auto_offset_reset="earliest"
    ) as consumer:
        assert consumer.poll(timeout_ms=60_000)
        consumer.commit()
    wait_until(lambda: not page.get("/api/group", name="readers")["member_count"], "it left")
    assert page.change("reset-group", group="readers", topic="made", to="earliest")["done"]
    offsets = {
        p["partition"]: p["committed"] for p in page.get("/api/group", name="readers")["partitions"]
    }
    assert offsets[1] == 0
    assert page.change("reset-group", group="readers", topic="made", to="latest")["done"]
    offsets = {
        p["partition"]: p["committed"] for p in page.get("/api/group", name="readers")["partitions"]
    }
    assert offsets[1] == 1
    status, _ = page.change("reset-group", group="readers", topic="made", to="time")
    assert status == 400
    assert page.change("delete-group", group="readers")["done"]
    delays = page.get("/api/delays", topic="later")["delays"]
    assert delays[0]["key"] == "u1"
    assert page.change("cancel-delay", delay_id=delays[0]["delay_id"])["done"]
    assert page.get("/api/delays", topic="later")["delays"] == []


def test_dead_letters_are_sent_again_once(page: Page, appliance: EmbeddedAppliance) -> None:
    with Producer(appliance.address) as producer:
        for number in range(5):
            producer.send("jobs", b"job %d" % number, headers=[("own", b"1")])
    with ShareConsumer(
        "jobs", bootstrap=appliance.address, group_id="work", auto_offset_reset="earliest"
    ) as consumer:
        rejected = 0
        while rejected < 5:
            for record in consumer.poll(timeout_ms=60_000):
                consumer.acknowledge(record, "reject")
                rejected += 1
            consumer.commit()
    answer = page.change("redrive", topic="jobs.dlq")
    assert answer == {"done": "5 records are sent again, 0 stay"}
    assert page.change("redrive", topic="jobs.dlq") == {"done": "0 records are sent again, 0 stay"}
    await_visible(appliance.address, "jobs")
    records = page.get("/api/records", topic="jobs", offset=0)["records"]
    values = [row["value"]["text"] for row in records]
    assert sorted(values[5:]) == [f"job {number}" for number in range(5)]
    assert [row["headers"] for row in records[5:]] == [[["own", {"text": "1"}]]] * 5


def test_streams_beyond_the_limit_and_readers_that_stop_leave_the_console_serving(
    page: Page,
) -> None:
    host, port = page.netloc.split(":")
    silent = []
    try:
        for _ in range(100):
            connection = socket.create_connection((host, int(port)), HANG_LIMIT_S)
            connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: {page.netloc}\r\n\r\n".encode())
            silent.append(connection)
        first = [connection.recv(64) for connection in silent]
        served = sum(b" 200 " in answer for answer in first)
        assert 1 <= served <= STREAMS_MAX
        assert page.get("/api/state")["error"] == ""
        assert page.ask("GET", "/health/live")[0] == 200
    finally:
        for connection in silent:
            connection.close()
    wait_until(lambda: _streams(page), "a stream is free again")


def _streams(page: Page) -> bool:
    connection = http.client.HTTPConnection(page.netloc, timeout=HANG_LIMIT_S)
    try:
        connection.request("GET", "/api/events")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def test_large_requests_are_refused_and_the_console_lives(page: Page) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(100 << 20)}
    host, port = page.netloc.split(":")
    with socket.create_connection((host, int(port)), HANG_LIMIT_S) as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"POST /api/sql HTTP/1.1\r\nHost: {page.netloc}\r\n{lines}\r\n".encode())
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    assert b" 400 " in answer.split(b"\r\n", 1)[0]
    assert page.ask("GET", "/health/live")[0] == 200


def test_the_command_line_prints_the_address_with_the_token(
    page: Page, appliance: EmbeddedAppliance
) -> None:
    done = run(appliance, "console")
    assert done.stdout.decode().strip() == f"{page.address}/#token={page.token}"
    assert json.loads(run(appliance, "console", "--json").stdout) == {
        "console": page.address,
        "token": page.token,
    }


ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.mark.slow_because("a browser starts")
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here (Debian: chromium)")
def test_a_browser_shows_sections_browses_records_and_runs_no_script_of_a_record(
    page: Page, appliance: EmbeddedAppliance
) -> None:
    from playwright.sync_api import sync_playwright

    writes = os.environ.get("TAILRACE_WRITE_DOCS") == "1"
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            tab = browser.new_page(viewport={"width": 1100, "height": 700})
            tab.set_default_timeout(HANG_LIMIT_S * 1000)
            tab.on("pageerror", lambda error: faults.append(str(error)))
            tab.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
            tab.goto(f"{page.address}/#token={page.token}")
            tab.wait_for_selector("#link.live")
            assert tab.inner_text("#access") == "Changes allowed"
            assert "token" not in tab.url
            assert tab.inner_text("h1") == "Overview"
            with Producer(appliance.address) as producer:

                def shows_latency() -> bool:
                    for _ in range(20):
                        producer.send("ticks", b"tick").result(HANG_LIMIT_S)
                    return "p99" in tab.inner_text("figure:has-text('Produce')")

                wait_until(shows_latency, "the page shows the latency of these records")
            _shot(tab, "overview", writes)
            tab.keyboard.press("g")
            tab.keyboard.press("t")
            tab.click("text=orders")
            tab.wait_for_selector("td:has-text('binary')")
            assert SCRIPT in tab.inner_text("main")
            assert tab.title() != "taken"
            _shot(tab, "topic", writes)
            tab.fill("input[name=search]", "v42")
            tab.click("text=Show")
            tab.wait_for_selector("text=1 records")
            tab.goto(f"{page.address}/#/topics/flights")
            tab.wait_for_selector("td:has-text('UA')")
            tab.select_option("select[name=format]", "columns")
            tab.wait_for_selector("th:has-text('carrier')")
            tab.click("summary:has-text('Produce one record')")
            tab.fill("textarea[name=value]", "not a row")
            tab.click("button:has-text('Produce one record')")
            tab.wait_for_selector(".said.bad-text:not(:empty)")
            tab.goto(f"{page.address}/#/sql")
            tab.fill("textarea", 'select partition, count(*) as records from "orders" group by 1')
            tab.click("button:has-text('Run')")
            tab.wait_for_selector("th:has-text('records')")
            _shot(tab, "sql", writes)
            for section in ("groups", "delays", "transactions", "processes"):
                tab.goto(f"{page.address}/#/{section}")
                tab.wait_for_selector("h1")
            tab.wait_for_selector("td:has-text('worker-0')")
            narrow = browser.new_context(
                viewport={"width": 390, "height": 700}, color_scheme="dark"
            ).new_page()
            narrow.goto(page.address)
            narrow.wait_for_selector("#link.live")
            assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
            assert narrow.inner_text("#access") == "Read only"
            _shot(narrow, "narrow", writes)
        finally:
            browser.close()
    refused = [fault for fault in faults if "400" not in fault]
    assert refused == []


LOW_CONTRAST = """() => {
  const channels = (color) => color.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.disabled) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const [a, b] = [light(channels(style.color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    seen += 1;
    if (ratio < (isLarge ? 3 : 4.5)) {
      low.push(`${element.tagName} ${walker.currentNode.data.trim()} ${ratio.toFixed(2)}`);
    }
  }
  return [seen, low];
}"""
"""Texts below the contrast of WCAG 2.2 AA (1.4.3) beside the number of all texts that are shown."""


@pytest.mark.slow_because("a browser starts")
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here (Debian: chromium)")
def test_every_text_has_the_contrast_of_wcag_aa_in_both_themes(page: Page) -> None:
    from playwright.sync_api import sync_playwright

    sections = ("", "topics", "topics/orders", "topics/flights", "groups", "delays",
                "transactions", "processes", "sql")  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            for theme in ("light", "dark"):
                tab = browser.new_context(color_scheme=theme).new_page()
                tab.set_default_timeout(HANG_LIMIT_S * 1000)
                tab.goto(f"{page.address}/#token={page.token}")
                tab.wait_for_selector("#link.live")
                backgrounds = tab.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (backgrounds == "rgb(255, 255, 255)") == (theme == "light")
                for section in sections:
                    tab.goto(f"{page.address}/#/{section}")
                    tab.wait_for_selector("main h1")
                    seen, low = tab.evaluate(LOW_CONTRAST)
                    assert seen > 10, section
                    assert low == [], (theme, section)
        finally:
            browser.close()


CHANGED_ROWS = """() => {
  window.changed = new Set();
  const body = document.querySelector("main tbody");
  new MutationObserver((records) => {
    for (const { target } of records) {
      const element = target.nodeType === 1 ? target : target.parentElement;
      window.changed.add(element.closest("tr")?.innerText.split("\\t")[0] ?? "the table");
    }
  }).observe(body, { subtree: true, childList: true, characterData: true });
  return body.rows.length;
}"""
"""Note the first cell of each row that changes from now on; the number of rows."""


@pytest.mark.slow_because("a browser starts")
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here (Debian: chromium)")
def test_a_thousand_topics_cost_a_change_its_own_row_alone() -> None:
    """A tick with one changed topic writes into one row; rows out of sight are not laid out."""
    from playwright.sync_api import sync_playwright

    running = start_embedded(settings={"http.listen": "127.0.0.1:0"})
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(f"t{number:03d}", 1) for number in range(1_000)])
        with sync_playwright() as playwright, Producer(running.address) as producer:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            try:
                tab = browser.new_page()
                tab.set_default_timeout(HANG_LIMIT_S * 1000)
                tab.goto(f"{console_of(running)}/#/topics")
                rows = "document.querySelectorAll('main tbody tr').length"
                wait_until(lambda: tab.evaluate(rows) == 1_000, "all topics are shown")
                style = "getComputedStyle(document.querySelector('tbody tr')).contentVisibility"
                assert tab.evaluate(style) == "auto"
                assert tab.evaluate(CHANGED_ROWS) == 1_000
                producer.send("t500", b"x").result(HANG_LIMIT_S)
                changed = "[...window.changed]"
                wait_until(lambda: "t500" in tab.evaluate(changed), "the page shows the record")
                assert tab.evaluate(changed) == ["t500"]
                tab.fill("input[type=search]", "t99")
                wait_until(lambda: tab.evaluate(rows) == 10, "ten topics have the word")
            finally:
                browser.close()
    finally:
        running.stop()


def _shot(tab: Any, name: str, writes: bool) -> None:
    """Make a screenshot, for the documents when they are written."""
    image = tab.screenshot()
    assert image.startswith(b"\x89PNG")
    if writes:
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f"console-{name}.png").write_bytes(image)
