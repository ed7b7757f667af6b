"""The page shows what the model computes, says in words what is wrong, and works without a network.

`make test-browser` runs these; the default suite leaves them out where Gradio is not installed.
"""

import functools
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import hf_scratch_transformer as scratch
from tests import tiny
from tests.test_pictures import LONG, MONEY, RIVER, image, native, ours

gradio = pytest.importorskip("gradio", reason="the page needs Gradio: make test-browser")
from hf_scratch_transformer.insight import page  # noqa: E402

MASKED = "She sat on the river [MASK]."
make = functools.cache(lambda name: ours(name) if name in tiny.FAMILIES else native(name))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    places = {name: tmp_path_factory.mktemp(name) / "tiny" for name in tiny.FAMILIES}
    for name, place in places.items():
        for part in make(name):
            part.save_pretrained(place)
    return places


def greatest(logits, count):
    probabilities = logits.softmax(-1)
    return probabilities.topk(count).values.tolist()


# What the model computes


@pytest.mark.parametrize("name", ["seq2seq", "marian"])
def test_a_translation_comes_with_the_attention_in_which_it_is_written(name):
    model, tokenizer = make(name)
    inputs = tokenizer([RIVER], return_tensors="pt")
    longest = 2 * inputs["input_ids"].shape[1] + 10
    text, figure = page.translate(model, tokenizer, RIVER, 0, 1)
    assert text == tokenizer.decode(model.generate(**inputs, max_new_tokens=longest)[0], skip_special_tokens=True)
    weights = page.attention_weights(model, tokenizer, RIVER, text)
    assert np.allclose(image(figure.axes[0]), weights.weights[0, 1])
    _, figure = page.translate(model, tokenizer, RIVER)
    assert len([axes for axes in figure.axes if axes.images]) == weights.weights[:, :, 0, 0].numel()


def test_a_translation_is_made_as_the_model_is_set_to_generate(monkeypatch):
    model, tokenizer = make("seq2seq")
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    beams, _ = page.translate(model, tokenizer, RIVER)
    monkeypatch.setattr(model.generation_config, "num_beams", 1)
    assert beams != page.translate(model, tokenizer, RIVER)[0]


@pytest.mark.parametrize("name", ["decoder", "gpt2"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution_of_the_next_token_is_the_models(name, temperature):
    model, tokenizer = make(name)
    logits = model(**tokenizer([RIVER], return_tensors="pt")).logits[0, -1].detach()
    shown = page.next_token(model, tokenizer, RIVER, temperature)
    assert list(shown.values()) == pytest.approx(greatest(logits / temperature, page.CANDIDATES))


def test_a_token_with_and_without_a_space_before_it_are_two(monkeypatch):
    _, tokenizer = make("decoder")
    vocabulary = tokenizer.get_vocab()
    token = next(token for token in sorted(vocabulary) if token.isalpha() and f"Ġ{token}" in vocabulary)
    logits = torch.full((len(tokenizer),), -torch.inf)
    logits[[vocabulary[token], vocabulary[f"Ġ{token}"], vocabulary["Ġriver"]]] = torch.tensor([0.5, 0.3, 0.2]).log()
    monkeypatch.setattr(page, "CANDIDATES", 3)
    assert page._likeliest(tokenizer, logits) == pytest.approx({token: 0.5, f"Ġ{token}": 0.3, "river": 0.2})


def test_a_continuation_is_drawn_from_the_distribution_that_is_shown():
    model, tokenizer = make("decoder")
    inputs = tokenizer([RIVER], return_tensors="pt")
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=9)[0]
    # So cold that only the likeliest token is ever drawn.
    assert page.continuation(model, tokenizer, RIVER, 1e-4, 9) == tokenizer.decode(greedy, skip_special_tokens=True)
    torch.manual_seed(0)
    drawn = {page.continuation(model, tokenizer, RIVER, 2.0, 1) for _ in range(150)}
    assert all(text.startswith(RIVER) for text in drawn)
    assert len(drawn) > 50, "transformers' default is to cut the distribution off after 50 tokens"


def test_a_continuation_ends_where_the_positions_do(monkeypatch):
    model, tokenizer = ours("decoder", max_position_embeddings=16, eos_token_id=None)
    lengths = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)))
    page.continuation(model, tokenizer, "the bank", new_tokens=500)
    assert lengths == [16]
    text = "x" * 16
    assert len(tokenizer(text)["input_ids"]) == 16
    with pytest.raises(ValueError, match="16 tokens, all that the model has positions for"):
        page.continuation(model, tokenizer, text)


@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_the_candidates_for_a_masked_word_are_the_models(name):
    model, tokenizer = make(name)
    inputs = tokenizer([MASKED], return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    logits = model(**inputs).logits[0, place].detach()
    shown = page.masked_word(model, tokenizer, MASKED)
    assert list(shown.values()) == pytest.approx(greatest(logits, page.CANDIDATES))
    assert next(iter(shown)) == page.readable(tokenizer, logits.argmax()[None])[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_word_is_shown_in_both_sentences(family):
    figure = page.moved_word(*make(family), " bank ", RIVER, MONEY)
    assert [axes.get_title() for axes in figure.axes] == [RIVER, MONEY]


# What is wrong


@pytest.mark.parametrize(
    ("name", "function", "words", "message"),
    [
        ("seq2seq", page.translate, [" \n"], "text is empty"),
        ("seq2seq", page.translate, [LONG * 9], "more than max_position_embeddings=128"),
        ("seq2seq", page.translate, [RIVER, 9], "layer=9"),
        ("decoder", page.next_token, [""], "text is empty"),
        ("decoder", page.next_token, [LONG * 9], "more than max_position_embeddings=128"),
        ("decoder", page.continuation, [LONG * 9], "more than max_position_embeddings=128"),
        ("encoder", page.masked_word, [""], "text is empty"),
        ("encoder", page.masked_word, [RIVER], r"one \[MASK\], where the word is to be guessed; it has 0"),
        ("encoder", page.masked_word, [MASKED * 2], "it has 2"),
        ("encoder", page.moved_word, ["sea", RIVER, MONEY], "word='sea' is not in the sentence 'She sat"),
        ("encoder", page.moved_word, ["", RIVER, MONEY], "word='' is not in the sentence"),
        ("encoder", page.moved_word, ["bank", RIVER, ""], "word='bank' is not in the sentence ''"),
    ],
)
def test_what_cannot_be_shown_is_said(name, function, words, message):
    with pytest.raises(ValueError, match=message):
        function(*make(name), *words)


def test_a_head_that_the_page_cannot_use_leaves_the_backbone(tmp_path):
    _, tokenizer = make("encoder")
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for part in (tiny.model(scratch.ScratchEncoderForTokenClassification, **fields), tokenizer):
        part.save_pretrained(tmp_path)
    assert type(page.open_folder(str(tmp_path))[0]) is scratch.ScratchEncoderModel
    assert tabs(page.build([tmp_path])) == ["A word in two sentences"]


def test_folders_that_cannot_be_shown(folders, tmp_path):
    model, tokenizer = make("encoder")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoTokenizer cannot open it"):
        page.build([folders["decoder"], tmp_path])
    tokenizer.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    fields.pop("mask_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match="its tokenizer has no mask_token"):
        page.build([tmp_path])
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match="3 weights of ScratchEncoderForMaskedLM are missing, model.layers.1.mlp.down"):
        page.build([tmp_path])
    with pytest.raises(ValueError, match="folders: give one at least"):
        page.build([])


# The page


def tabs(blocks):
    return [block.label for block in blocks.blocks.values() if isinstance(block, gradio.Tab)]


def test_each_family_has_its_tabs_and_several_folders_are_a_choice(folders):
    own = {"encoder": "Masked word", "decoder": "Next token", "seq2seq": "Translation"}
    for family, folder in folders.items():
        assert tabs(page.build([folder])) == [own[family], "A word in two sentences"]
    assert tabs(page.build([*folders.values()])) == [
        name for family, folder in folders.items() for name in (str(folder), own[family], "A word in two sentences")
    ]


def test_programs_call_the_page_by_the_names_of_its_functions(folders):
    expected = {
        "/translate": ["text", "layer", "head"],
        "/next_token": ["text", "temperature"],
        "/continuation": ["text", "temperature", "new_tokens"],
        "/masked_word": ["text"],
        "/moved_word": ["word", "first", "second"],
    }
    found = {}
    for folder in folders.values():
        for name, endpoint in page.build([folder]).get_api_info()["named_endpoints"].items():
            found[name] = [parameter["parameter_name"] for parameter in endpoint["parameters"]]
    assert found == expected


def test_a_message_quotes_what_was_typed_and_runs_nothing_of_it(folders):
    blocks = page.build([folders["encoder"]])
    answer = next(block.fn for block in blocks.fns.values() if block.api_name == "moved_word")
    with pytest.raises(gradio.Error) as raised:
        answer("<b>bank", RIVER, MONEY)
    assert "word='&lt;b&gt;bank' is not in the sentence" in raised.value.message


@pytest.mark.parametrize(
    ("family", "name", "sent", "message"),
    [
        ("decoder", "next_token", [RIVER, "hot"], "Temperature: TypeError"),
        ("decoder", "next_token", [None, 1.0], "Text: nothing was sent"),
        ("decoder", "continuation", [RIVER, 1.0, -3], "Tokens to generate, at most: .*-3"),
        ("seq2seq", "translate", [RIVER, "third", "all"], "Layer: .*third"),
    ],
)
def test_what_was_not_sent_by_the_page_is_refused_by_its_name(folders, family, name, sent, message):
    """Anybody may send a request with other values than the page offers."""
    blocks = page.build([folders[family]])
    answer = next(block for block in blocks.fns.values() if block.api_name == name)
    assert not answer.preprocess
    with pytest.raises(gradio.Error, match=message) as raised:
        answer.fn(*sent)
    assert not raised.value.print_exception


def test_serving_calls_nobody(folders, monkeypatch):
    called = []
    connect = socket.socket.connect

    def watched(self, address):
        called.append(address[0])
        return connect(self, address)

    def lookup(host, *others, **options):
        called.append(host)
        return resolve(host, *others, **options)

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.delenv("GRADIO_ANALYTICS_ENABLED", raising=False)
    blocks = page.build([folders["decoder"]])
    try:
        blocks.launch(prevent_thread_lock=True, quiet=True, share=False)
        time.sleep(1)  # what is sent is sent by a thread
    finally:
        blocks.close()
    assert set(called) == {"127.0.0.1"}


# In a browser


@pytest.fixture
def server(folders):
    """The command, serving the three families; its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["serve", *map(str, folders.values()), "--port", str(port)]
    program = [sys.executable, "-m", "hf_scratch_transformer.cli", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"open http://127.0.0.1:{port}/ in a browser; Ctrl+C ends it\n"
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors


@pytest.fixture
def browser(tmp_path):
    """A headless Chromium that finds no host but this machine."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium with chromedriver on this machine (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium: make test-browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={tmp_path}",
        "--window-size=1280,1300",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.get(address)

    def find(self, path):
        """The first visible element of an XPath, waited for."""
        for _ in range(600):
            for element in self.browser.find_elements("xpath", path):
                if element.is_displayed():
                    return element
            time.sleep(0.1)
        raise AssertionError(f"{path} is not to be seen")

    def tab(self, name):
        self.find(f"//button[@role='tab'][normalize-space()='{name}']").click()

    def press(self, name):
        self.find(f"//button[not(@role='tab')][normalize-space()='{name}']").click()

    def box(self, label):
        return self.find(f"//label[.//span[normalize-space()='{label}']]//*[self::textarea or self::input]")

    def type(self, label, text):
        self.box(label).clear()
        self.box(label).send_keys(text)

    def picture(self):
        """The size of the picture that is shown."""
        shown = self.find("//img[starts-with(@src, 'data:image/png')]")
        return [int(shown.get_attribute(side)) for side in ("naturalWidth", "naturalHeight")]

    def messages(self):
        return [toast.text for toast in self.browser.find_elements("css selector", ".toast-body") if toast.text]


@pytest.mark.slow
def test_a_person_sees_every_family_in_a_browser_that_has_no_network(browser, server, folders):
    page = Page(browser, server)

    page.tab(folders["seq2seq"])
    page.type("Sentence", RIVER)
    page.press("Translate")
    assert min(page.picture()) > 200
    model, tokenizer = make("seq2seq")
    longest = 2 * len(tokenizer(RIVER)["input_ids"]) + 10
    written = model.generate(**tokenizer([RIVER], return_tensors="pt"), max_new_tokens=longest)
    assert page.box("Translation").get_attribute("value") == tokenizer.decode(written[0], skip_special_tokens=True)
    page.tab("A word in two sentences")
    page.type("Word", "bank")
    page.type("A sentence with it", RIVER)
    page.type("Another", MONEY)
    page.press("Show")
    assert min(page.picture()) > 200

    page.tab(folders["decoder"])
    page.type("Text", "The bank")
    page.press("Predict")
    page.find("//*[contains(text(), '%')]")
    page.press("Generate")
    for _ in range(300):
        if text := page.box("Continuation").get_attribute("value"):
            break
        time.sleep(0.1)
    assert text.startswith("The bank")

    page.tab(folders["encoder"])
    page.type("Sentence with one [MASK]", "She sat on the [MASK].\n")
    page.find("//*[contains(text(), '%')]")
    assert page.messages() == []

    page.tab("A word in two sentences")
    page.type("Word", "<img src=x onerror=document.title=1>")
    page.type("A sentence with it", RIVER)
    page.press("Show")
    page.find("//*[contains(@class, 'toast-body')]")
    (message,) = page.messages()
    assert "word='<img src=x onerror=document.title=1>' is not in the sentence 'She sat" in message
    assert "Traceback" not in message and browser.title == "scratch-transformer"

    log = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [line["params"]["request"]["url"] for line in log if line["method"] == "Network.requestWillBeSent"]
    hosts = {urlsplit(url).hostname for url in asked if urlsplit(url).scheme not in ("data", "blob", "chrome")}
    assert len(asked) > 20 and hosts == {"127.0.0.1"}
    assert browser.get_log("browser") == []
