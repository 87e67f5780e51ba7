"""The HTML report in a real browser: it opens at once, without an error, on every screen, and can be worked with."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("jinja2", reason="the extra 'report' is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")

_PATIENCE = 600


class Browser:
    """Chromium without a window, told what to do over its DevTools protocol."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command = [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = self._port(folder / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=_PATIENCE) as answer:
                page = next(x for x in json.load(answer) if x["type"] == "page")
            self._socket = _WebSocket("127.0.0.1", port, page["webSocketDebuggerUrl"].split(str(port), 1)[1])
        except BaseException:
            self.close()
            raise
        self._number, self.events = 0, list[Any]()
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def _port(self, file: Path) -> int:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and self._process.poll() is None:
            if file.exists() and len(file.read_text().split()) == 2:
                return int(file.read_text().split()[0])
            time.sleep(0.05)
        pytest.skip("chromium does not start here")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Ask for something; its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> list[Any]:
        """Load a page; the errors that the browser has to say of it."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.receive()))
        said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in said]

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        text = {"text": "\r"} if key == "Enter" else {}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()


class _WebSocket:
    """As much of the protocol as the browser speaks: text, one peer, no extension."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=_PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        fields = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13"
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{fields}\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._exactly(1)
        assert b" 101 " in head

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
        self._socket.sendall(b"\x81" + size + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self) -> str:
        text, last = b"", False
        while not last:
            first, size = self._exactly(2)
            last = bool(first & 0x80)
            wide = {126: ">H", 127: ">Q"}.get(size)
            if wide:
                (size,) = struct.unpack(wide, self._exactly(struct.calcsize(wide)))
            text += self._exactly(size)
        return text.decode()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            assert more, "the browser hung up"
            data += more
        return data


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of twelve blocks: too many nodes to be shown all at once."""
    path = tmp_path_factory.mktemp("report") / "out.html"
    with torch.no_grad():
        model = nn.Sequential(*(Block() for _ in range(12))).eval()
        torch.compile(model, backend="sardonyx", options={"report": str(path)})(torch.randn(4, 16))
    return path


BOXES = "document.querySelectorAll('#drawing .box').length"


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")], ids=["light", "dark", "phone"]
)
def test_it_opens_without_an_error_and_nothing_is_cut_off(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    assert browser.open(page, width, scheme=scheme) == []
    assert browser.value(BOXES) > 5
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    dark = browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    assert dark == (scheme == "dark")


def test_what_it_loads_is_itself_alone(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.value("performance.getEntriesByType('resource').length") == 0
    assert page.stat().st_size < 3_000_000


def test_the_theme_can_be_switched(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.value("document.getElementById('theme').click()")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"


def test_modules_open_and_close_with_mouse_and_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.value("document.getElementById('collapse').click()")
    before = browser.value(BOXES)
    first = "document.querySelector('#drawing .box.module')"
    browser.value(f"{first}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert browser.value(BOXES) > before
    assert browser.value(f"{first}.getAttribute('aria-expanded')") == "true"
    browser.value(f"{first}.focus()")
    browser.press("Enter")
    assert browser.value(BOXES) == before


def test_everything_can_be_expanded_and_a_node_tells_what_it_is(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.value("document.getElementById('expand').click()")
    assert browser.value(BOXES) > 60
    browser.value("document.querySelector('#drawing .box[aria-label*=Gemm]').dispatchEvent(new MouseEvent('click'))")
    told = browser.value("document.getElementById('details').innerText")
    assert all(word in told for word in ("Gemm", "0.up", "time of a call", "difference from PyTorch", "self.up"))


def test_no_two_boxes_of_a_module_lie_on_each_other(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.value("document.getElementById('expand').click()")
    overlaps = """(() => {
      const drawn = document.querySelectorAll('#drawing .box:not(.open) > rect:first-of-type');
      const closed = [...drawn].map((x) => x.getBBox());
      return closed.flatMap((a, i) => closed.slice(i + 1).filter((b) =>
        a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height)).length;
    })()"""
    assert browser.value(overlaps) == 0


def test_heat_before_and_after_and_zoom(browser: Browser, page: Path) -> None:
    browser.open(page)
    warm = "document.querySelectorAll('#drawing rect[style*=hot]').length"
    assert browser.value(warm) > 0
    browser.value("document.querySelector('input[name=heat][value=\"\"]').click()")
    assert browser.value(warm) == 0
    scale = "document.querySelector('#drawing svg > g').getAttribute('transform')"
    before = browser.value(scale)
    browser.value("document.getElementById('drawing').focus()")
    browser.press("+")
    assert browser.value(scale) != before
    browser.value("document.querySelector('input[name=stage][value=before]').click()")
    assert browser.value(BOXES) > 5


def test_it_can_be_printed(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert base64.b64decode(browser("Page.printToPDF")["data"]).startswith(b"%PDF")
    browser("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.value("getComputedStyle(document.querySelector('.controls')).display") == "none"


def test_heat_is_by_nodes_whatever_is_open(browser: Browser, page: Path) -> None:
    browser.open(page)
    scale = "document.getElementById('scale').textContent"
    browser.value("document.getElementById('collapse').click()")
    closed = browser.value(scale)
    browser.value("document.getElementById('expand').click()")
    assert browser.value(scale) == closed
    assert closed.startswith("time of a node")


def test_a_node_is_found_by_its_module(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.value("document.getElementById('collapse').click()")
    browser.value("document.getElementById('search').focus()")
    browser.value("document.getElementById('search').value = '7.up'")
    browser.value("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert "found" in browser.value("document.getElementById('found').textContent")
    browser.press("Enter")
    assert "7.up" in browser.value("document.getElementById('details').innerText")


def test_a_row_of_the_slowest_nodes_leads_to_its_node(browser: Browser, page: Path) -> None:
    browser.open(page)
    link = "document.querySelector('#slowest-table a')"
    browser.value(f"{link}.click()")
    told = browser.value("document.getElementById('details').innerText")
    assert browser.value(f"{link}.dataset.node") in told
    assert "inputs" in told


def test_tables_are_sorted_by_the_heading_that_is_chosen(browser: Browser, page: Path) -> None:
    browser.open(page)
    heading = "document.querySelectorAll('#slowest-table thead button')[1]"
    values = "[...document.querySelectorAll('#slowest-table tbody tr')].map((x) => Number(x.cells[1].dataset.value))"
    for expected in (True, False):
        browser.value(f"{heading}.click()")
        found = browser.value(values)
        assert found == sorted(found, reverse=expected)
        assert len(set(found)) > 1


def test_tables_can_be_copied(browser: Browser, page: Path) -> None:
    browser.open(page)
    button = "document.querySelector('#environment-title .copy')"
    browser.value(f"{button}.click()")
    for _ in range(6000):
        if browser.value(f"{button}.dataset.copied"):
            break
        time.sleep(0.05)
    assert "python: 3" in browser.value(f"{button}.dataset.copied")
