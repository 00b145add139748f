"""The WebUI in a browser, from our file to the loss curve; over its own interface, what needs no browser."""

import json

import gradio_client
import pytest
import torch
import yaml
from gradio_client.exceptions import AppError

from suites.llamafactory.browsing import opened, programs
from suites.llamafactory.running import losses


def test_a_user_in_a_browser_loads_previews_trains_and_resumes(webui, folder, tmp_path):
    """As docs/frameworks/llamafactory.md says, with the small model."""
    out = folder / "saves" / "Custom" / "lora" / "browser"
    with opened(webui, tmp_path) as page:
        page.shows("Preview command")
        page.choose("Language", "en")
        page.choose("Model name", "Custom")
        page.shows("non-instruct model")  # the last of what that choice sets off; it empties the path
        page.write("Model path", "./small")
        page.choose("Config path", "scao_smollm2.yaml")
        page.press("Load arguments")
        page.shows("restored")
        page.press("Extra configurations")
        further = json.loads(page.wait(lambda: page.read("Extra arguments")))
        assert further["optim"] == "scao"
        page.write("Output dir", "browser")
        page.write("number input for Cutoff length", "64")
        page.press("Preview command")
        page.wait(lambda: "--optim scao" in page.box())
        assert all(option in page.box() for option in ("--lora_rank 16", "--cutoff_len 64"))
        trained(page)
        assert sorted(losses(out, ".")) == list(range(1, 9))
        assert_scao(out / "checkpoint-8", steps=8)
        page.write("Extra arguments", json.dumps({**further, "max_steps": 9}))
        trained(page)
        # Not before: the page looks at the log every two seconds, and a fast machine's eight steps may fall in between.
        page.wait(lambda: page.curve() > 0.5)
    assert sorted(losses(out, ".")) == list(range(1, 10))
    assert_scao(out / "checkpoint-9", steps=9)
    assert yaml.safe_load((out / "training_args.yaml").read_text())["optim"] == "scao"


def trained(page):
    """Press "Start" and wait for the end."""
    page.press("Start")
    page.wait(lambda: "Finished." not in page.box())
    page.wait(
        lambda: any(word in page.box() for word in ("Finished.", "Failed.")) or "Error" in page.text(), 300, every=1
    )
    assert "Finished." in page.box(), page.text()[-3000:]
    assert "'loss'" in page.box()  # the log is shown


def assert_scao(checkpoint, steps):
    """What was saved is an optimizer state of SCAO after so many steps."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert "refresh_every" in saved["param_groups"][0]
    assert {"left", "right"} <= {name.partition("_")[0] for state in saved["state"].values() for name in state}
    assert max(int(state["step"]) for state in saved["state"].values()) == steps


class Page:
    """What the page sends: it holds the values, and all of them go with each click."""

    def __init__(self, address):
        self.client = gradio_client.Client(address, verbose=False, _skip_components=False)
        self.calls = {call["api_name"]: call for call in self.client.config["dependencies"]}
        values = {part["id"]: part["props"].get("value") for part in self.client.config["components"]}
        labels = zip(self.calls["change_lang"]["outputs"], self.call("en", name="change_lang"), strict=True)
        self.labels = {number: update.get("label") for number, update in labels}
        self.inputs = self.calls["run_train"]["inputs"]
        self.values = {number: values[number] for number in self.inputs}

    def call(self, *values, name):
        return self.client.predict(*values, api_name=f"/{name}")

    def set(self, **values):
        for label, value in values.items():
            (number,) = [n for n in self.inputs if self.labels.get(n) == label.replace("_", " ")]
            self.values[number] = value

    def load(self, file):
        answers = self.call("en", file, name="load_args")
        for number, answer in zip(self.calls["load_args"]["outputs"], answers, strict=True):
            if number in self.values and not (isinstance(answer, dict) and answer.get("__type__") == "update"):
                self.values[number] = answer
        return answers[-1]

    def click(self, name):
        """The text in the box below the buttons, and what else was drawn."""
        return "\n".join(map(str, self.call(*(self.values[number] for number in self.inputs), name=name)))


@pytest.fixture(scope="module")
def page(webui):
    return Page(webui)


def test_both_files_are_offered_and_that_for_gpus_is_previewed(page):
    choices = [list(choice) for choice in page.call("now", name="list_config_paths")["choices"]]
    assert all([name, name] in choices for name in ("scao.yaml", "scao_smollm2.yaml"))
    assert "restored" in page.load("scao.yaml")
    page.set(Language="en", Model_name="Custom", Model_path="./small", Output_dir="web", Dataset=["stdlib_docs"])
    text = page.click("preview_train")
    assert all(f"--{option}" in text for option in ("optim scao", "quantization_bit 4", "lora_rank 16"))


def test_a_wrong_option_in_extra_arguments_is_shown_in_the_page(page):
    assert "restored" in page.load("scao_smollm2.yaml")
    page.set(Language="en", Model_name="Custom", Model_path="./small", Output_dir="refused")
    page.set(Extra_arguments='{"optim": "scao", "optim_args": "spike_rnk=8", "use_cpu": true}')
    try:
        text = page.click("run_train")
    except AppError as error:
        text = str(error)
    assert "Failed" in text
    assert "did you mean 'spike_rank'" in text


def test_without_a_browser_the_test_is_skipped_but_fails_in_ci(monkeypatch):
    """With one sentence that says how to install it, either way."""
    monkeypatch.setenv("SCAO_BROWSER", "/nowhere/chromium")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="run: apt-get install chromium chromium-driver"):
        programs()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="run: apt-get install chromium chromium-driver"):
        programs()
