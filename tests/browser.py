"""The page of `serve` in a headless Chromium: what a person sees and does, for its tests and its pictures in docs/.

`make screenshots MODELS="TRANSLATOR TRANSLATOR"` takes the pictures, of two models of the demonstration.
"""

import argparse
import base64
import io
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image

DESKTOP, PHONE = (1280, 900), (390, 844)
SENTENCE = "The guest who swam in the river is looking for a bank."


@contextmanager
def serving(folders):
    """The command, serving these models; its address. It must end with Ctrl+C, and without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["serve", *map(str, folders), "--port", str(port)]
    program = [sys.executable, "-m", "hf_scratch_transformer.cli", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"open http://127.0.0.1:{port}/ in a browser; Ctrl+C ends it\n"
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors


@contextmanager
def chromium(folder):
    """A headless Chromium that finds no host but this machine, and keeps what it keeps in a folder.

    Raises:
        ModuleNotFoundError: without selenium.
        FileNotFoundError: without Chromium or its driver.
    """
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        raise FileNotFoundError("no chromium with chromedriver on this machine: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, browser, address, size=DESKTOP):
        self.browser = browser
        width, height = size
        # A window is never as narrow as a phone; what it shows can be.
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(address)

    def wait(self, found, what):
        """What a function gives, as soon as that is something; the page may replace what it is about to give."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(StaleElementReferenceException):
                if result := found():
                    return result
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within a minute")

    def seen(self, path):
        """The visible elements of an XPath."""
        return [element for element in self.browser.find_elements("xpath", path) if element.is_displayed()]

    def find(self, path):
        """The first visible element of an XPath, waited for."""
        return self.wait(lambda: self.seen(path), path)[0]

    def click(self, path):
        """Its text, which it had."""

        def clicked():
            for element in self.seen(path)[:1]:
                text = element.text
                element.click()
                return text or " "

        return self.wait(clicked, path)

    def tab(self, name):
        """Open a tab, also one that has no room in its row and is in the menu beside it."""
        own = f"[normalize-space()='{name}']"
        hidden = f"//*[contains(@class, 'overflow-dropdown')]//button{own}"
        menu = f"//*[contains(@class, 'overflow-menu')][.{hidden}]/button"
        if self.click(f"//button[@role='tab']{own} | {menu}") != str(name):
            self.click(hidden)

    def press(self, name):
        self.click(f"//button[not(@role='tab')][normalize-space()='{name}']")

    def box(self, label):
        return self.find(f"//label[.//span[normalize-space()='{label}']]//*[self::textarea or self::input]")

    def boxes(self, label):
        path = f"//label[.//span[normalize-space()='{label}']]//*[self::textarea or self::input]"
        return self.wait(lambda: [box.get_attribute("value") for box in self.seen(path)], label)

    def type(self, label, text):
        self.box(label).clear()
        self.box(label).send_keys(text)

    def choose(self, label, option):
        """Of a list that opens."""
        self.click(f"//input[@role='combobox'][@aria-label='{label}']")
        self.click(f"//li[@role='option'][@aria-label='{option}']")

    def pictures(self):
        """The sizes of the pictures that are shown."""
        shown = self.wait(lambda: self.seen("//img[starts-with(@src, 'data:image/png')]"), "a picture")
        return [[int(each.get_attribute(side)) for side in ("naturalWidth", "naturalHeight")] for each in shown]

    def scales(self):
        """Of each picture that is shown, how large it is beside how it was drawn, and where it begins in its frame."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('.picture img')].filter(each => each.offsetParent).map(each => "
            "[each.getBoundingClientRect().width / each.naturalWidth, "
            "each.getBoundingClientRect().x - each.parentElement.getBoundingClientRect().x])"
        )

    def notes(self):
        """In one look: they are replaced while they are read."""
        shown = "[...document.querySelectorAll('.note p')].filter(note => note.offsetParent)"
        return self.browser.execute_script(f"return {shown}.map(note => note.innerText)")

    def messages(self):
        return [toast.text for toast in self.browser.find_elements("css selector", ".toast-body") if toast.text]

    def widths(self):
        """Of what is on the page, and of the screen."""
        return self.browser.execute_script("return [document.scrollingElement.scrollWidth, innerWidth]")

    def photograph(self, path, height=None):
        """All of the page, or its upper part, as a PNG of few colours, and small."""
        width = self.widths()[1]
        height = height or self.browser.execute_script("return document.scrollingElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        options = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        data = self.browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
        picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        picture.quantize(128).save(path, optimize=True)
        print(path)


def screenshots(models, folder):
    """The pictures of docs/."""
    with serving(models) as address, tempfile.TemporaryDirectory() as profile, chromium(profile) as browser:
        shown = Page(browser, address)
        shown.type("Sentence", SENTENCE)
        shown.press("Translate")
        shown.pictures()
        time.sleep(1)  # what glides has arrived
        shown.photograph(folder / "serve.png")

        shown.tab("Compare")
        shown.type("Sentence", SENTENCE)
        shown.press("Translate")
        shown.wait(lambda: len(shown.notes()) == 2, "both answers")
        time.sleep(1)
        shown.photograph(folder / "serve_compare.png", height=620)

        shown = Page(browser, address, PHONE)
        shown.type("Sentence", SENTENCE)
        shown.press("Translate")
        (every,) = shown.pictures()
        shown.choose("Head", "2")
        shown.wait(lambda: shown.pictures() != [every], "one head")
        time.sleep(1)
        shown.photograph(folder / "serve_phone.png", height=PHONE[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=screenshots.__doc__)
    parser.add_argument("models", metavar="MODEL", nargs=2, help="a translator's folder")
    screenshots(parser.parse_args().models, Path(__file__).parents[1] / "docs")
