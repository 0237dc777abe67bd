"""The live page: its files, its feed, and the page itself in headless Chromium."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from surefoot.serving import live as live_module
from surefoot.serving.live import HEADERS, KEPT, PAGE, Live
from surefoot.speculation.cost import CostTable
from tests.serving import browser
from tests.serving.browser import Page
from tests.serving.server import Live as Running
from tests.serving.server import engine, scripted, serve, tiny

KEY = "a-key-of-the-page"
SAID = "ab ab ab ab ab ab ab ab é ☃ ab ab ab ab ab ab 😀 ab ab ab ab end"
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "tokens.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def table() -> CostTable:
    """Costs of a machine that does not exist, rising with the rows."""
    return CostTable(token_buckets=(1, 8, 40), verify_ms=((1.0, 2.0, 6.0),), draft_requests=(1, 8), draft_ms=(0.1, 0.2))


def slow() -> Any:
    """A model that takes its time: an answer of 400 tokens lasts for seconds."""
    target = tiny()
    honest = target.forward

    def forward(*args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return honest(*args, **options)

    target.forward = forward  # type: ignore[method-assign]
    return target


@contextmanager
def feed(url: str, key: str | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The events of `/live`: name and data."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("GET", f"{url}/live", headers=headers, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")

        def events() -> Iterator[tuple[str, dict[str, Any]]]:
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

        yield events()


def next_snapshot(events: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return next(data for name, data in events if name == "snapshot")


class TestFiles:
    def test_every_file_comes_with_its_type_and_the_strict_policy(self, http: httpx.Client) -> None:
        assert {path.name for path in PAGE.iterdir()} == set(TYPES)
        for name, kind in TYPES.items():
            for path in [f"/page/{name}", *(["/"] if name == "index.html" else [])]:
                answer = http.get(path)
                assert answer.status_code == 200
                assert answer.headers["content-type"] == kind
                assert answer.content == (PAGE / name).read_bytes()
                assert {header: answer.headers[header] for header in HEADERS} == HEADERS
        policy = HEADERS["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy

    def test_a_known_version_is_not_sent_again(self, http: httpx.Client) -> None:
        tag = http.get("/").headers["etag"]
        assert http.get("/", headers={"If-None-Match": tag}).status_code == 304

    def test_nothing_outside_the_page_is_served(self, http: httpx.Client) -> None:
        for path in ("/page/../live.py", "/page/%2e%2e/live.py", "/page/..%2flive.py", "/page/nothing.js", "/page/"):
            answer = http.get(path)
            assert answer.status_code == 404, path
            assert answer.json()["error"]["message"]

    def test_the_page_fetches_nothing_from_elsewhere_and_has_no_inline_script_or_style(self) -> None:
        for path in PAGE.iterdir():
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]", text), path.name
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", page)

    def test_the_files_are_part_of_the_package(self) -> None:
        text = (PAGE.parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        assert '"serving/page/*"' in text


class TestFeed:
    def test_it_tells_known_traffic(self) -> None:
        """Two answers of known length: every count of the feed, and the sum of its rates."""
        with serve(engine(tiny(), cost_table=table())) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            page: Live = live.app.state.live
            with feed(live.url) as events:
                assert next(events)[0] == "history"
                before = next_snapshot(events)
                assert before["totals"] == {"tokens": 0, "requests": 0, "steps": 0}
                assert before["requests"] == []
                body = {"messages": [{"role": "user", "content": "ab" * 20}], "max_tokens": 40, "ignore_eos": True}
                answer = http.post("/v1/chat/completions", json={**body, "temperature": 0, "stream": False})
                assert answer.json()["usage"]["completion_tokens"] == 40
                plain = {"prompt": "abc", "max_tokens": 9, "ignore_eos": True, "speculative": False, "temperature": 0}
                assert http.post("/v1/completions", json=plain).status_code == 200
                for _ in range(20):
                    told = next_snapshot(events)
                    if told["sample"][0] > before["sample"][0] and told["totals"]["tokens"] == 49:
                        break
                told = next_snapshot(events)
            assert told["state"] == "ready"
            assert told["totals"]["tokens"] == 49
            assert told["totals"]["requests"] == 2
            assert told["server"]["model"] == "tiny"
            second, first = told["requests"]
            assert (first["endpoint"], first["tokens"], first["speculative"], first["finish"]) == (
                "chat",
                40,
                True,
                "length",
            )
            assert (second["tokens"], second["speculative"], second["finish"]) == (9, False, "length")
            assert second["tokens_per_step"] == 1.0
            assert first["tokens_per_step"] == round(40 / (told["totals"]["steps"] - 9), 2)
            assert first["prompt"] == answer.json()["usage"]["prompt_tokens"]
            assert first["ttft_ms"] > 0
            facts, stats = told["engine"], live.llm.stats()
            assert facts["widths"] == stats["blocks"]["widths"]
            warm_up = sum(before["engine"]["widths"].values())
            assert sum(facts["widths"].values()) - warm_up == told["totals"]["steps"]
            assert facts["verified"] == stats["blocks"]["verified"] > 0
            assert facts["reasons"] == stats["reasons"]
            assert facts["acceptance"] == [round(share, 4) for share in stats["derived"]["acceptance_by_position"]]
            for name, sums in (("predicted", "confidence_sum"), ("observed", "survived_sum")):
                means = [total / n if n else None for total, n in zip(stats[sums], stats["labelled"], strict=True)]
                assert facts[name] == [None if mean is None else round(mean, 4) for mean in means]
            assert facts["running"] == facts["waiting"] == 0
            assert facts["cache_total"] == stats["blocks_total"]
            assert (facts["drafter"], facts["gamma"]) == ("prompt-lookup", 4)
            assert sum(verified for verified, _ in facts["sources"].values()) == facts["verified"]
            # Rate × seconds is the number of tokens, for history and totals are made of the same counts.
            spans = [b.time - a.time for a, b in zip(page.history, list(page.history)[1:], strict=False)]
            carried = sum(b.tokens_per_s * span for b, span in zip(list(page.history)[1:], spans, strict=True))
            first_second = page.history[0].tokens_per_s
            assert carried + first_second * 1.0 == pytest.approx(49, rel=0.1)

    def test_the_cost_curve_is_the_table_s_and_the_point_is_where_the_engine_ran(self) -> None:
        with serve(engine(tiny(), cost_table=table())) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            with feed(live.url) as events:
                next_snapshot(events)
                body = {"prompt": "abcabc", "max_tokens": 200, "ignore_eos": True, "speculative": False}
                asking = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body})
                asking.start()
                told = next(t for t in iter(lambda: next_snapshot(events), None) if t["engine"]["cost"]["point"])
                asking.join()
            cost = told["engine"]["cost"]
            used = live.llm.engine.policy.costs.table
            assert used is not None
            assert cost["rows"][0] == 1
            assert cost["rows"][-1] == 8 * (4 + 1)
            assert cost["ms"] == pytest.approx(
                [used.verify_ms_at(row, cost["context"]) for row in cost["rows"]], rel=0.05
            )
            assert cost["point"]["rows"] == pytest.approx(1.0, abs=0.05)  # one answer without drafts is one row a step
            assert cost["point"]["measured_ms"] > 0
            assert 0 < cost["break_even"]["acceptance"] < 1

    def test_without_watchers_the_engine_is_never_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        honest = live_module.engine_facts
        monkeypatch.setattr(live_module, "engine_facts", lambda engine: (asked.append(1), honest(engine))[1])
        monkeypatch.setattr(live_module, "EVERY_S", 0.05)
        with serve(engine(tiny())) as live:
            page: Live = live.app.state.live
            _until(lambda: len(page.history) > 5)
            assert not asked
            with feed(live.url) as events:
                for _ in range(3):
                    next_snapshot(events)
            assert asked
            _until(lambda: page.watchers == 0)
            known, seconds = len(asked), len(page.history)
            _until(lambda: len(page.history) > seconds + 4)
            assert len(asked) <= known + 1  # one may have been on its way

    def test_the_history_is_kept_for_ten_minutes_and_no_longer(self) -> None:
        page = Live(_state())
        for _ in range(KEPT + 25):
            page.sample()
        assert len(page.history) == KEPT == 600

    def test_a_client_that_leaves_in_mid_answer_is_listed_as_ended(self) -> None:
        with serve(engine(slow())) as live:
            page: Live = live.app.state.live
            body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=30) as response:
                next(response.iter_lines())
            with feed(live.url) as events:
                told = next_snapshot(events)
                for _ in range(20):
                    if told["requests"] and told["requests"][0]["finish"]:
                        break
                    told = next_snapshot(events)
            assert told["requests"][0]["finish"] == "abort"
            _until(lambda: not page._running)

    def test_no_text_of_anybody_is_told(self) -> None:
        with serve(engine(tiny())) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            secret = "zebra-in-the-prompt"
            body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3}
            said = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "i" * 100}).json()
            with feed(live.url) as events:
                next(events)
                told = next_snapshot(events)
            assert len(told["requests"][0]["id"]) == 8
            text = json.dumps(told, ensure_ascii=False)
            assert secret not in text
            assert "prompt_token_ids" not in text
            assert said["choices"][0]["message"]["content"] not in text

    def test_it_wants_the_key_that_the_server_wants(self) -> None:
        with serve(engine(tiny()), api_keys=(KEY,)) as live, httpx.Client(base_url=live.url) as http:
            assert http.get("/").status_code == 200
            assert http.get("/page/main.js").status_code == 200
            assert http.get("/live").status_code == 401
            with feed(live.url, KEY) as events:
                assert next(events)[0] == "history"
        with serve(engine(tiny()), api_keys=(KEY,), metrics_need_key=False) as live, feed(live.url) as events:
            assert next(events)[0] == "history"

    def test_so_many_pages_and_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_module, "MOST_WATCHERS", 1)
        with serve(engine(tiny())) as live:
            with feed(live.url) as events:
                next(events)
                answer = httpx.get(f"{live.url}/live")
            assert answer.status_code == 429
            assert answer.headers["Retry-After"]

    def test_an_open_page_does_not_keep_a_draining_server(self) -> None:
        with serve(engine(tiny())) as live, feed(live.url) as events:
            next_snapshot(events)
            live.state.draining = True
            begun = time.monotonic()
            last = [data for _, data in events][-1]  # the stream ends by itself
            assert time.monotonic() - begun < 5
            assert last["state"] == "draining"

    def test_a_lost_engine_is_told(self) -> None:
        with serve(engine(tiny())) as live, feed(live.url) as events:
            next_snapshot(events)
            live.llm.loop.failure = RuntimeError("out of luck")
            last = [data for _, data in events][-1]
            assert last["state"] == "lost"
            assert "out of luck" in last["message"]
            assert last["engine"] is None


def _state() -> Any:
    return SimpleNamespace(slots=1, answers=0)


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- in the browser ------------------------------------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(
    browser.PROGRAM is None, reason="NO CHROMIUM HERE: the page itself is not tested (apt-get install chromium)"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Callable[[], Page]]:
    with browser.chromium() as tab:
        yield tab


@pytest.fixture
def tab(chromium: Callable[[], Page]) -> Iterator[Callable[[], Page]]:
    """Opens tabs that are closed after the test: a browser has six connections for all tabs of a server."""
    pages: list[Page] = []

    def opened() -> Page:
        pages.append(chromium())
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def talking() -> Iterator[Running]:
    """A server whose model says `SAID`, with drafts that are accepted, rejected and missing."""
    with serve(engine(scripted(SAID), cost_table=table())) as live:
        yield live


def ready(page: Page, url: str) -> None:
    page.open(url)
    page.wait("document.getElementById('phase').dataset.phase === 'ready'")


def answer(page: Page, text: str = "ab ab ab") -> dict[str, Any]:
    """Ask in the chat box, by keyboard; what the answer looks like when it is complete."""
    page.run("document.getElementById('message').focus()")
    page.type(text)
    before = page.run("document.querySelectorAll('.turn').length")
    page.press("Enter")
    page.wait(
        f"document.querySelectorAll('.turn').length === {before + 2}"
        " && document.getElementById('log').getAttribute('aria-busy') === 'false'"
    )
    told = page.run("""(() => {
        const turn = [...document.querySelectorAll('.turn')].pop();
        const marks = [...turn.querySelectorAll('.t')];
        return {text: turn.querySelector('.answer:not(.thought)').textContent, tale: turn.querySelector('.tale').textContent,
                kinds: marks.map((mark) => mark.className.replace('t t-', '')), titles: marks.map((mark) => mark.title),
                legend: [...document.querySelectorAll('#legend li')].map((item) => item.innerText.split('\\n').pop())};
    })()""")
    return dict(told)


def chats(page: Page) -> list[dict[str, Any]]:
    """The bodies that the page has sent to the chat endpoint."""
    page.run("1")  # takes in what has happened
    return [json.loads(body) for _, url, body in page.requests if url.endswith("/v1/chat/completions")]


@needs_chromium
class TestPage:
    def test_an_answer_comes_marked_by_origin_and_complete(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        ready(page, talking.url)
        told = answer(page)
        with talking.openai() as client:
            text = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ab ab ab"}], temperature=0
            )
        assert told["text"] == text.choices[0].message.content == SAID
        assert {"lookup", "recovered", "target"} <= set(told["kinds"])
        grounds = page.run("""[...new Set([...document.querySelectorAll('.turn .t')].map((mark) =>
            getComputedStyle(mark).backgroundColor + getComputedStyle(mark).textDecorationStyle))].length""")
        assert grounds >= 3  # colours that are really applied, each with a line of its own
        body = chats(page)[-1]
        assert body["stream_options"]["include_origins"] is True
        assert "speculative" not in body
        tokens = int(re.search(r"(\d+) tokens", told["tale"])[1])  # type: ignore[index]
        assert tokens == text.usage.completion_tokens
        assert page.text("#v-spec td:nth-child(4)") == str(tokens)
        assert float(page.text("#v-spec td:nth-child(3)")) > 1
        assert "tok/s" in told["tale"]
        assert not page.errors

    def test_the_switch_sends_target_only(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        ready(page, talking.url)
        page.click("#target-only")
        told = answer(page)
        assert told["text"] == SAID
        assert set(told["kinds"]) == {"target"}
        assert chats(page)[-1]["speculative"] is False
        assert page.text("#v-target td:nth-child(3)") == "1.00"
        page.click("#target-only")
        assert "lookup" in answer(page)["kinds"]
        sent = chats(page)[-1]
        assert "speculative" not in sent
        assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
        assert not page.errors

    def test_the_figures_are_the_feed_s(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        ready(page, talking.url)
        answer(page)
        page.wait("document.querySelectorAll('#requests tr td:first-child.id').length > 0")
        page.wait("document.querySelectorAll('#c-widths rect').length === 5")
        page.wait(
            "document.querySelector('#c-cost .line') !== null && document.querySelector('#c-rate .line') !== null"
        )
        page.wait("document.querySelector('#c-survival .dot-second') !== null")
        with feed(talking.url) as events:
            told = next_snapshot(events)
        page.wait(f"document.getElementById('totals').innerText.includes('{told['totals']['tokens']} tokens')")
        facts = told["engine"]
        assert page.text("#n-accept") == f"{100 * facts['accepted'] / facts['verified']:.0f} %"
        assert page.text("#model") == "tiny"
        assert f"{100 * facts['cost']['break_even']['acceptance']:.0f} %" in page.text("#planner-note")
        label = page.run("document.querySelector('#c-widths svg').getAttribute('aria-label')")
        assert all(f"{width}:" in label for width in range(5))
        assert not page.errors

    def test_stop_ends_the_answer_and_keeps_what_came(self, tab: Callable[[], Page]) -> None:
        with serve(engine(slow())) as live:
            page = tab()
            ready(page, live.url)
            page.run("document.getElementById('most').value = 400, document.getElementById('temperature').value = 1")
            page.run("document.getElementById('message').focus()")
            page.type("go on")
            page.press("Enter")
            page.wait("document.querySelectorAll('.turn .t').length > 3")
            page.press("Escape")
            page.wait("document.querySelector('.tale').innerText.includes('stopped')")
            _until(lambda: live.state.answers == 0)
            assert "stopped" in page.text("#said")
            assert not page.run("document.getElementById('send').disabled")
            assert not page.errors

    def test_a_refusal_is_told_and_the_message_is_kept(self, tab: Callable[[], Page]) -> None:
        with serve(engine(tiny()), max_prompt_tokens=64) as live:
            page = tab()
            ready(page, live.url)
            told = answer(page, "x" * 600)
            assert "Refused (400)" in told["tale"]
            assert "64" in told["tale"]
            assert page.run("document.getElementById('message').value.length") == 600

    def test_everything_can_be_done_by_keyboard(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        ready(page, talking.url)
        seen: list[str] = []
        for _ in range(40):
            page.press("Tab")
            name = page.run(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
            outline = page.run("""(() => { const e = document.activeElement.id === 'target-only'
                ? document.querySelector('.track') : document.activeElement;
                return getComputedStyle(e).outlineStyle + ' ' + parseFloat(getComputedStyle(e).outlineWidth); })()""")
            if name == "BODY" or (seen and name == seen[0]):
                break
            seen.append(name)
            style, thickness = outline.split()
            assert (style, float(thickness) >= 2) == ("solid", True), f"{name} shows no focus: {outline}"
        wanted = ["skip", "theme", "log", "chip", "message", "send", "target-only", "temperature", "most", "scroll"]
        assert [name for name in dict.fromkeys(seen) if name in wanted] == wanted  # in the order of the page, no trap
        page.run("document.getElementById('theme').focus()")
        page.press("Enter")
        assert page.run("document.documentElement.dataset.theme") == "light"
        page.run("document.getElementById('target-only').focus()")
        page.press(" ")
        assert page.run("document.getElementById('target-only').checked")
        assert set(answer(page)["kinds"]) == {"target"}
        assert page.run("document.activeElement.id") == "message"
        assert not page.run("""[...document.querySelectorAll('input, textarea, button')].some((e) =>
            !(e.labels?.length || e.getAttribute('aria-label') || e.innerText))""")

    @pytest.mark.parametrize("width", [360, 768, 1440])
    def test_no_horizontal_scroll_and_no_shift(self, tab: Callable[[], Page], talking: Running, width: int) -> None:
        page = tab()
        page.size(width, 800)
        ready(page, talking.url)
        page.run("""window.shifts = []; new PerformanceObserver((list) => list.getEntries().forEach((entry) =>
            window.shifts.push([entry.value, entry.sources.map((s) => s.node?.id || s.node?.className || '')])))
            .observe({type: 'layout-shift'})""")
        height = page.run("document.documentElement.scrollHeight")
        page.run("document.getElementById('target-only').focus()")
        answer(page)
        page.wait("document.querySelectorAll('#requests tr').length > 0")
        time.sleep(2.2)  # two snapshots
        wide = page.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1] == width
        outside = page.run("""[...document.querySelectorAll('body *')].filter((e) =>
            !e.closest('.scroll, .served, .visually-hidden, .skip')
            && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.tagName + '.' + e.className + '#' + e.id)""")
        assert not outside
        charts = page.run("[...document.querySelectorAll('.plot')].map((e) => e.clientHeight)")
        assert charts == [150] * 4
        rows = page.run("document.querySelectorAll('#requests tr').length")
        assert (
            page.run("document.documentElement.scrollHeight") - height <= 30 * rows
        )  # only the list grows, at the end
        assert sum(value for value, _ in page.run("window.shifts")) < 0.05, page.run("window.shifts")

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_contrast(self, tab: Callable[[], Page], talking: Running, theme: str) -> None:
        page = tab()
        page.media(prefers_color_scheme=theme)
        ready(page, talking.url)
        page.run("localStorage.clear(), delete document.documentElement.dataset.theme")
        answer(page)
        page.wait("document.querySelectorAll('#requests td').length > 1")
        # Every kind of token, and the states that are not on show, are looked at, too.
        page.run("""['draft', 'lookup', 'prediction', 'recovered', 'bonus', 'target'].forEach((kind) => {
            const e = document.createElement('span'); e.className = `t t-${kind}`; e.textContent = kind;
            document.querySelector('.turn .answer').append(e); });
            ['notice', 'keybox'].forEach((id) => { document.getElementById(id).hidden = false; });
            document.getElementById('notice').textContent = 'notice';""")
        found = page.run(CONTRAST)
        assert len(found) > 60
        dark = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (theme == "dark")
        low = [entry for entry in found if entry["ratio"] < 4.5]
        assert not low, low
        edges = page.run(EDGES)
        assert len(edges) > 10
        assert not [entry for entry in edges if entry["ratio"] < 3.0], edges

    def test_the_chosen_theme_wins_and_is_kept(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        page.media(prefers_color_scheme="light")
        ready(page, talking.url)
        ground = "getComputedStyle(document.body).backgroundColor"
        page.run("delete document.documentElement.dataset.theme, localStorage.clear()")
        light = page.run(ground)
        page.click("#theme")
        assert page.run(ground) == light
        page.click("#theme")
        assert page.text("#theme") == "Dark"
        dark = page.run(ground)
        assert dark != light
        ready(page, talking.url)
        assert page.run(ground) == dark
        page.click("#theme")
        assert page.text("#theme") == "Auto"

    def test_less_motion_is_no_motion(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        page.media(prefers_reduced_motion="reduce")
        ready(page, talking.url)
        moving = "getComputedStyle(document.querySelector('.track'), '::after').transitionDuration"
        assert float(page.run(moving).removesuffix("s")) == 0
        page.run("document.querySelector('.empty').classList.add('caret')")
        assert page.run("getComputedStyle(document.querySelector('.caret'), '::after').animationName") == "none"

    def test_without_a_key_it_asks_and_with_one_it_works(self, tab: Callable[[], Page]) -> None:
        with serve(engine(tiny()), api_keys=(KEY,)) as live:
            page = tab()
            page.open(live.url)
            page.wait("document.getElementById('phase').dataset.phase === 'locked'")
            assert not page.run("document.getElementById('keybox').hidden")
            assert page.run("sessionStorage.length") == 0
            page.run("document.getElementById('key').focus()")
            page.type("not-the-right-one")
            page.press("Enter")
            page.wait("document.getElementById('notice').innerText.includes('does not know')")
            page.type(KEY)
            page.press("Enter")
            page.wait("document.getElementById('phase').dataset.phase === 'ready'")
            assert page.run("document.getElementById('keybox').hidden")
            assert answer(page)["kinds"]
            assert page.run("[JSON.stringify(localStorage), document.cookie]") == ["{}", ""]
            assert not any(KEY in url for _, url, _ in page.requests)
            assert all("401" in error for error in page.errors)  # the browser's own lines about the refusals

    def test_it_comes_back_when_the_server_does(self, tab: Callable[[], Page]) -> None:
        page = tab()
        with serve(engine(tiny())) as live:
            port = live.port
            ready(page, live.url)
            live.state.draining = True  # as on SIGTERM
            page.wait("document.getElementById('phase').dataset.phase !== 'ready'")
        page.wait("document.getElementById('phase').dataset.phase === 'offline'")
        assert "No connection" in page.text("#notice")
        assert page.run("document.body.classList.contains('stale')")
        with serve(engine(tiny()), served_model_name="the-second", listen=port):
            page.wait("document.getElementById('phase').dataset.phase === 'ready'")
            page.wait("document.getElementById('model').innerText === 'the-second'")
            assert page.run("document.getElementById('notice').hidden")
            assert answer(page)["kinds"]
        assert all("ERR_" in error for error in page.errors), (
            page.errors
        )  # what the browser says about a server that is away

    def test_a_page_that_nobody_sees_does_not_watch(self, tab: Callable[[], Page], talking: Running) -> None:
        page = tab()
        ready(page, talking.url)
        watched: Live = talking.app.state.live
        assert watched.watchers == 1
        hidden = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}})"
        event = "document.dispatchEvent(new Event('visibilitychange'))"
        page.run(f"{hidden.format('true')}, {event}")
        _until(lambda: watched.watchers == 0)
        page.run(f"{hidden.format('false')}, {event}")
        _until(lambda: watched.watchers == 1)
        assert not page.errors

    def test_a_lost_engine_is_shown(self, tab: Callable[[], Page]) -> None:
        with serve(engine(tiny())) as live:
            page = tab()
            ready(page, live.url)
            live.llm.loop.failure = RuntimeError("out of luck")
            page.wait("document.getElementById('phase').dataset.phase === 'lost'")
            assert "out of luck" in page.text("#notice")

    def test_no_piece_of_text_is_lost_whatever_the_tokens(self, tab: Callable[[], Page], talking: Running) -> None:
        """Characters over several tokens, special tokens, held-back text, a dropped first space."""
        page = tab()
        ready(page, talking.url)
        pieces = page.run("""import('/page/tokens.js').then(({Pieces}) => {
            const run = (...steps) => { const p = new Pieces();
                return steps.flatMap(([text, tokens, origins]) => p.push(text, tokens, origins))
                    .map((x) => [x.text, x.origin]); };
            return {
                plain: run(['ab cd', ['ab', ' cd'], ['dspark', 'bonus']]),
                split: run(['a', ['a', '\\ufffd'], ['dspark', 'recovered']], ['é b', ['\\ufffd', ' b'], ['dspark', 'bonus']]),
                special: run(['x', ['<|im_end|>', 'x'], ['target', 'dspark']]),
                held: run(['', ['ST'], ['dspark']], ['STx', ['x'], ['recovered']]),
                first: run(['Hello', [' Hello'], ['target']]),
                unknown: run(['???', ['a', 'b'], ['dspark', 'bonus']]),
                late: run(['tail', [], []]),
            }; })""")
        assert pieces == {
            "plain": [["ab", "dspark"], [" cd", "bonus"]],
            "split": [["a", "dspark"], ["é", "dspark"], [" b", "bonus"]],
            "special": [["x", "dspark"]],
            "held": [["ST", "dspark"], ["x", "recovered"]],
            "first": [["Hello", "target"]],
            "unknown": [["???", "bonus"]],
            "late": [["tail", "target"]],
        }


LUMINANCE = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const colour = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const ground = (e) => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor);
        if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
    const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
    const told = (e, r) => ({what: `${e.tagName}.${e.getAttribute('class') ?? ''}#${e.id} ${e.textContent.slice(0, 30)}`,
        ratio: Math.round(r * 100) / 100});
"""
CONTRAST = f"""(() => {{ {LUMINANCE}
    return [...document.querySelectorAll('body *')].filter((e) => e.getClientRects().length && !e.closest(':disabled')
        && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .map((e) => told(e, ratio(colour(e.namespaceURI.endsWith('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color),
            ground(e)))); }})()"""
"""WCAG's contrast of every element with text against the ground under it."""
EDGES = f"""(() => {{ {LUMINANCE}
    const edges = [...document.querySelectorAll('input:not([role=switch]), textarea, .track, .plain:enabled, .chip')]
        .filter((e) => e.getClientRects().length)
        .map((e) => told(e, ratio(colour(getComputedStyle(e).borderTopColor), ground(e.parentElement))));
    const lines = [...document.querySelectorAll('.plot .line')]
        .map((e) => told(e, ratio(colour(getComputedStyle(e).stroke), ground(e.parentElement))));
    const marks = [...document.querySelectorAll('.legend .t:not(.t-target)')]
        .map((e) => told(e, ratio(colour(getComputedStyle(e).textDecorationColor), colour(getComputedStyle(e).backgroundColor))));
    return [...edges, ...lines, ...marks]; }})()"""
"""That of edges of controls, of the lines of charts and of the lines under tokens."""
