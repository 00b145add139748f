"""A page of the WebUI in a headless Chromium: fields by their labels, buttons by their words, as a user finds them."""

import os
import shutil
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

MISSING = (
    "the WebUI's test needs a Chromium and its driver; run: apt-get install chromium chromium-driver, or name the two in "
    "SCAO_BROWSER=/path/to/chromium and SCAO_BROWSER_DRIVER=/path/to/chromedriver"
)
# Nothing outside of this machine is asked for: the page names fonts and a script elsewhere, and must not wait for them.
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1600,2400",
]
# Over which share of an image's width something blue is drawn, as the loss curves are; axes and text are black.
BLUE = """
const image = arguments[0], canvas = document.createElement('canvas');
const width = canvas.width = image.naturalWidth, height = canvas.height = image.naturalHeight;
if (!image.complete || !width) return 0;
const pen = canvas.getContext('2d');
pen.drawImage(image, 0, 0);
const data = pen.getImageData(0, 0, width, height).data, columns = new Set();
for (let i = 0; i < data.length; i += 4) if (data[i + 2] - data[i] > 60) columns.add(i / 4 % width);
return columns.size / width;
"""


def programs():
    """The browser and its driver; without them the test is skipped, and fails where it has to run: in CI."""
    browser = os.environ.get("SCAO_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    driver = os.environ.get("SCAO_BROWSER_DRIVER") or shutil.which("chromedriver")
    if browser and driver and all(map(shutil.which, (browser, driver))):
        return browser, driver
    if os.environ.get("CI"):
        pytest.fail(MISSING)
    pytest.skip(MISSING)


@contextmanager
def opened(url, folder):
    """The page in a new browser without a history, whose profile is in the folder."""
    browser, driver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"):
        options.add_argument(flag)
    chromium = webdriver.Chrome(options=options, service=Service(driver))
    try:
        chromium.get(url)
        yield Tab(chromium)
    finally:
        chromium.quit()


class Tab:
    """What is on the screen."""

    def __init__(self, chromium):
        self.chromium = chromium

    def wait(self, condition, seconds=60, every=0.3):
        """What the condition gives, once it is true."""
        ignored = (ElementNotInteractableException, StaleElementReferenceException)
        waiting = WebDriverWait(self.chromium, seconds, poll_frequency=every, ignored_exceptions=ignored)
        return waiting.until(lambda _: condition(), message=self.text()[-3000:])

    def find(self, selector):
        """The first element on the screen, or None."""
        found = self.chromium.find_elements(By.XPATH, selector)
        return next((element for element in found if element.is_displayed()), None)

    def text(self):
        """All that can be read, messages too."""
        return self.chromium.find_element(By.TAG_NAME, "body").text

    def box(self):
        """What stands in the box below the buttons, without the messages that come and go."""
        found = self.chromium.find_elements(By.CSS_SELECTOR, ".prose")
        return "\n".join(element.text for element in found if element.is_displayed())

    def shows(self, words, seconds=60):
        """Wait for words."""
        self.wait(lambda: words in self.text(), seconds)

    def choose(self, label, value):
        """One of the values that a field offers."""
        field = self.wait(lambda: self.find(f"//input[@aria-label='{label}']"))
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value)
        self.wait(lambda: self.find(f"//li[@role='option'][@aria-label='{value}']")).click()
        self.wait(lambda: field.get_attribute("value") == value)

    def write(self, label, value):
        """Text into a field."""
        labelled = f"//label[span[normalize-space()='{label}']]//textarea | //input[@aria-label='{label}']"
        field = self.wait(lambda: self.find(labelled))
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value, Keys.TAB)
        self.wait(lambda: field.get_attribute("value") == value)

    def read(self, label):
        """The text in a field."""
        return self.find(f"//label[span[normalize-space()='{label}']]//textarea").get_attribute("value")

    def press(self, words):
        """A button."""
        self.wait(lambda: self.find(f"//button[starts-with(normalize-space(), '{words}')]")).click()

    def curve(self):
        """Over which share of the width of its picture the loss curve is drawn."""
        image = self.find("//*[@data-testid='matplotlib']//img")
        return self.chromium.execute_script(BLUE, image) if image else 0
