"""Makes docs/images/page-*.png: the live page over a running server, under a little traffic.

surefoot serve --port 8123
python -m tests.serving.make_screenshots http://127.0.0.1:8123
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import httpx

from tests.serving.browser import Page, chromium

IMAGES = Path(__file__).parents[2] / "docs/images"
PROMPTS = (
    "Write a Python class for a binary search tree with insert, find and delete.",
    "Explain what a mutex is to somebody who knows loops.",
    "Write a Python function that parses a CSV line with quotes, and three tests.",
    "Repeat this text three times: to be or not to be, that is the question.",
    "Write the SQL for a table of invoices and a query for the ten largest.",
)
CHAT = "Write a Python function that merges two sorted lists."


def main(url: str, seconds: float) -> None:
    """Traffic for so many seconds, then a chat both ways, then the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    leave = threading.Event()
    clients = [threading.Thread(target=traffic, args=(url, i, leave)) for i in range(2)]
    with chromium() as tab:
        page = tab()
        page.size(1440, 1180)
        page.media(prefers_color_scheme="light")
        page.open(url)
        for client in clients:
            client.start()
        time.sleep(seconds)
        leave.set()
        for client in clients:
            client.join()
        for target_only in (True, False):
            if page.run("document.getElementById('target-only').checked") != target_only:
                page.click("#target-only")
            if not page.run("document.getElementById('clear').disabled"):
                page.click("#clear")  # or the second answer would be copied from the first
            ask(page, CHAT)
        leave.clear()
        client = threading.Thread(target=traffic, args=(url, 1, leave))
        client.start()
        time.sleep(6)
        page.run("document.activeElement.blur(), scrollTo(0, 0), document.getElementById('log').scrollTo(0, 0)")
        page.shoot(IMAGES / "page-light.png")
        page.media(prefers_color_scheme="dark")
        time.sleep(1.5)
        page.shoot(IMAGES / "page-dark.png")
        page.media(prefers_color_scheme="light")
        page.size(360, 2600)
        page.run("scrollTo(0, 0)")
        time.sleep(1.5)
        page.shoot(IMAGES / "page-narrow.png")
        leave.set()
        client.join()


def ask(page: Page, text: str) -> None:
    page.click("#message")
    page.type(text)
    page.press("Enter")
    page.wait("document.getElementById('log').getAttribute('aria-busy') === 'true'")
    page.wait("document.getElementById('log').getAttribute('aria-busy') === 'false'", 180)


def traffic(url: str, which: int, leave: threading.Event) -> None:
    """One client: answer after answer, with pauses."""
    with httpx.Client(base_url=url, timeout=300) as http:
        while not leave.is_set():
            message = {"role": "user", "content": PROMPTS[which % len(PROMPTS)]}
            body = {"messages": [message], "max_tokens": 60 + 45 * (which % 4), "temperature": 0.5}
            http.post("/v1/chat/completions", json=body).raise_for_status()
            which += 1
            leave.wait(1 + which % 3)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
