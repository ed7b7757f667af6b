"""The page shows what the model computes, says in words what is wrong, and works without a network.

`make test-browser` runs these; the default suite leaves them out where Gradio is not installed.
"""

import functools
import json
import socket
import threading
import time
import urllib.request
from urllib.parse import urlsplit

import pytest
import transformers

import hf_scratch_transformer as scratch
from tests import tiny
from tests.browser import DESKTOP, PHONE, Page, chromium, serving
from tests.test_pictures import MONEY, RIVER, native, ours

gradio = pytest.importorskip("gradio", reason="the page needs Gradio: make test-browser")
import gradio_client  # noqa: E402

from hf_scratch_transformer.insight import page, streaming  # noqa: E402
from hf_scratch_transformer.insight.answers import continuation, translate  # noqa: E402

make = functools.cache(lambda name: ours(name) if name in tiny.FAMILIES else native(name))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    places = {name: tmp_path_factory.mktemp(name) / "tiny" for name in tiny.FAMILIES}
    for name, place in places.items():
        for part in make(name):
            part.save_pretrained(place)
    return places


def test_a_head_that_the_page_cannot_use_leaves_the_backbone(tmp_path):
    _, tokenizer = make("encoder")
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for part in (tiny.model(scratch.ScratchEncoderForTokenClassification, **fields), tokenizer):
        part.save_pretrained(tmp_path)
    assert type(page.open_folder(str(tmp_path))[0]) is scratch.ScratchEncoderModel
    assert tabs(page.build([tmp_path])) == ["Attention", "A word in two sentences"]


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


OWN = {
    "encoder": ["Masked word", "Attention", "A word in two sentences"],
    "decoder": ["Continuation", "Next token", "Attention", "A word in two sentences"],
    "seq2seq": ["Translation", "A word in two sentences"],  # the attention is below what is written
}


def test_each_family_has_its_tabs_and_several_folders_are_a_choice(folders):
    for family, folder in folders.items():
        assert tabs(page.build([folder])) == OWN[family]
    assert tabs(page.build([*folders.values()])) == [
        name for family, folder in folders.items() for name in (str(folder), *OWN[family])
    ]


def test_a_model_without_attention_has_no_such_tab(tmp_path):
    _, tokenizer = make("decoder")
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    for part in (transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)), tokenizer):
        part.save_pretrained(tmp_path)
    assert tabs(page.build([tmp_path])) == ["Continuation", "Next token", "A word in two sentences"]


def test_models_with_the_same_head_are_compared(folders, tmp_path):
    for part in make("gpt2"):
        part.save_pretrained(tmp_path)
    blocks = page.build([folders["decoder"], tmp_path, folders["encoder"]])
    assert tabs(blocks)[-3:] == ["Compare", "Continuation", "Next token"]
    found = blocks.get_api_info()["named_endpoints"]
    for name, words in {"continuation": ["temperature", "new_tokens", "seed"], "next_token": ["temperature"]}.items():
        parameters = [parameter["parameter_name"] for parameter in found[f"/compare_{name}"]["parameters"]]
        assert parameters == ["first", "second", "text", *words]


def test_programs_call_the_page_by_the_names_of_its_functions(folders):
    expected = {
        "/translate": ["text"],
        "/attended": ["text", "layer", "head", "of"],
        "/next_token": ["text", "temperature"],
        "/continuation": ["text", "temperature", "new_tokens", "seed"],
        "/masked_word": ["text"],
        "/moved_word": ["word", "first", "second"],
    }
    for folder in folders.values():
        endpoints = page.build([folder]).get_api_info()["named_endpoints"]
        for name, endpoint in endpoints.items():
            parameters = [parameter["parameter_name"] for parameter in endpoint["parameters"]]
            assert parameters == expected[name] + ["translation"] * (name == "/attended" and "/translate" in endpoints)
    assert {block.api_name for block in page.build([*folders.values()]).fns.values()} >= {n[1:] for n in expected}


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
        ("decoder", "continuation", [RIVER, 1.0, -3, 0], "Tokens to generate, at most: .*-3"),
        ("decoder", "continuation", [RIVER, 1.0, 3, "x"], "Seed: "),
        ("seq2seq", "attended", [RIVER, "third", "all", "cross", ""], "Layer: .*third"),
    ],
)
def test_what_was_not_sent_by_the_page_is_refused_by_its_name(folders, family, name, sent, message):
    """Anybody may send a request with other values than the page offers."""
    blocks = page.build([folders[family]])
    answer = next(block for block in blocks.fns.values() if block.api_name == name)
    assert not answer.preprocess
    with pytest.raises(gradio.Error, match=message) as raised:
        answer = answer.fn(*sent)
        list(answer)  # of one that is shown bit by bit
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


# Several at once


@pytest.fixture
def slow(monkeypatch):
    """A model takes its time for each token, so that there is something to see."""

    def take_time(self, *_, ask=streaming.Watch.__call__):
        time.sleep(0.05)
        return ask(self, *_)

    monkeypatch.setattr(streaming.Watch, "__call__", take_time)


@pytest.fixture(scope="module")
def alike(folders, tmp_path_factory):
    """Three that write on, one of them native, and two that guess and two that translate."""
    places = dict(folders)
    endless = ours("decoder", max_position_embeddings=1024, eos_token_id=None)
    for name, parts in {"endless": endless, **{name: make(name) for name in ("gpt2", "bert", "marian")}}.items():
        places[name] = tmp_path_factory.mktemp(name) / "tiny"
        for part in parts:
            part.save_pretrained(places[name])
    return places


@pytest.fixture
def served(alike):
    """The page of these models in this process; its address."""
    blocks = page.build([alike[name] for name in ("endless", "decoder", "gpt2")])
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, share=False)
    yield address
    blocks.close(verbose=False)


def at_work():
    return [thread for thread in threading.enumerate() if thread.name.startswith("generate")]


def wait(found):
    end = time.monotonic() + 30
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def test_two_visitors_at_once_get_their_own_text(slow, served):
    clients = [gradio_client.Client(served, verbose=False) for _ in range(2)]
    jobs = [
        client.submit(text, 1.0, 25, 0, api_name="/continuation")
        for client, text in zip(clients, (RIVER, MONEY), strict=True)
    ]
    wait(lambda: len(at_work()) == 2)
    for job, text in zip(jobs, (RIVER, MONEY), strict=True):
        job.result()
        shown = [text for text, _ in job.outputs()]
        assert len(set(shown)) > 3 and all(each == "" or each.startswith(text) for each in shown)
    jobs = [clients[0].submit(RIVER, 1.0, 25, 0, api_name="/continuation") for _ in range(page.AT_ONCE + 1)]
    wait(lambda: len(at_work()) == page.AT_ONCE)
    most = [len(at_work()) for _ in iter(lambda: all(job.done() for job in jobs), True)]
    assert max(most) == page.AT_ONCE, "who comes later waits"
    wait(lambda: not at_work())


def test_who_goes_away_leaves_nothing_at_work(slow, served):
    """500 tokens take 25 seconds."""
    body = json.dumps({"data": [RIVER, 1.0, 500, 0]}).encode()
    url = f"{served}gradio_api/call/continuation"
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}/{event}") as answer:
        assert answer.readline() == b"event: generating\n"
        assert len(at_work()) == 1
    started = time.monotonic()
    wait(lambda: not at_work())
    assert time.monotonic() - started < 12


# In a browser


@pytest.fixture
def browser(tmp_path):
    pytest.importorskip("selenium", reason="the browser is driven by selenium: make test-browser")
    try:
        with chromium(tmp_path) as browser:
            yield browser
    except FileNotFoundError as error:
        pytest.skip(str(error))


def written(seen):
    """What a page shows, look by look, until it is the same for a second."""
    looks = [seen()]
    end = time.monotonic() + 60
    while time.monotonic() < end and not (len(looks) > 20 and len({*map(str, looks[-20:])}) == 1 and any(looks[-1])):
        time.sleep(0.05)
        looks.append(seen())
    return looks


BESIDE = "//input[@aria-label='Beside it']"  # which is where two models are compared


def fill(shown, name):
    """Ask in the open tab of this name, and wait for what is answered."""
    match name:
        case "Translation":
            shown.type("Sentence", RIVER)
            shown.press("Translate")
            shown.pictures() if not shown.seen(BESIDE) else shown.wait(lambda: len(shown.notes()) == 2, "two notes")
        case "Continuation":
            shown.type("Text", RIVER)
            shown.press("Generate")
            shown.wait(lambda: len(shown.notes()) == 1 + bool(shown.seen(BESIDE)), "notes")
        case "Next token":
            shown.type("Text", RIVER)
            shown.press("Predict")
            shown.find("//*[contains(text(), '%')]")
        case "Masked word":
            shown.type("Sentence with one [MASK]", "She sat on the [MASK].\n")
            shown.find("//*[contains(text(), '%')]")
        case "Attention":
            shown.type("Text to read", RIVER)
            shown.press("Show")
            shown.pictures()
        case "A word in two sentences":
            shown.type("Word", "bank")
            shown.type("A sentence with it", RIVER)
            shown.type("Another", MONEY)
            shown.press("Show")
            shown.pictures()


@pytest.mark.slow
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_tab_with_its_answer_fits_the_screen(browser, alike, size):
    names = ["seq2seq", "decoder", "encoder", "marian", "gpt2", "bert"]
    with serving([alike[name] for name in names]) as address:
        shown = Page(browser, address, size)
        open_tabs = {str(alike[name]): OWN[name] for name in names[:3]}
        open_tabs["Compare"] = ["Translation", "Continuation", "Next token", "Masked word"]
        for outer, inner in open_tabs.items():
            shown.tab(outer)
            for name in inner:
                shown.tab(name)
                fill(shown, name)
                needed, there = shown.widths()
                assert needed <= there == size[0], (outer, name)
                assert all(scale > 0.8 and start >= 0 for scale, start in shown.scales()), "it can be read"
                for control in shown.seen("//button | //textarea | //input[not(@type='range')]"):
                    if control.rect["width"]:
                        assert 0 <= control.rect["x"] <= control.rect["x"] + control.rect["width"] <= there
        assert shown.messages() == []


@pytest.mark.slow
def test_a_text_is_seen_to_grow_and_is_stopped(browser, slow, served, alike):
    shown = Page(browser, served)
    shown.type("Text", RIVER)
    shown.press("Generate")
    text = lambda: shown.box("Continuation").get_attribute("value")  # noqa: E731
    shown.wait(lambda: len(text()) > len(RIVER), "a first word")
    shorter = text()
    shown.wait(lambda: len(text()) > len(shorter), "more")
    assert text().startswith(shorter) and len(at_work()) == 1
    shown.press("Stop")
    wait(lambda: not at_work())
    time.sleep(0.5)
    stopped = text()
    time.sleep(0.5)
    assert text() == stopped and "tokens/s" in shown.notes()[0]
    assert len(make("decoder")[1](stopped)["input_ids"]) < 80, "of 100 tokens, which take five seconds"

    shown.press("Generate")
    shown.wait(lambda: len(at_work()) == 1, "another text")
    browser.get("about:blank")
    wait(lambda: not at_work())


@pytest.mark.slow
def test_two_models_answer_side_by_side(browser, slow, served, alike):
    shown = Page(browser, served)
    shown.tab("Compare")
    shown.choose("Model", alike["decoder"])
    shown.choose("Beside it", alike["gpt2"])
    shown.type("Text", RIVER)
    shown.press("Generate")
    looks = written(lambda: shown.boxes("Continuation"))
    for side in range(2):
        assert len({look[side] for look in looks}) > 4, "both are seen to grow"
    seeds = {"temperature": 1.0, "new_tokens": 100, "seed": 0}
    expected = [[*continuation(*make(name), RIVER, **seeds)][-1][0] for name in ("decoder", "gpt2")]
    assert [box.split() for box in looks[-1]] == [text.split() for text in expected]
    notes = shown.notes()
    assert len(notes) == 2 and all("first token after" in note and "tokens/s" in note for note in notes)

    left, right = (shown.seen(f"//input[@aria-label='{label}']")[0].rect for label in ("Model", "Beside it"))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    shown = Page(browser, served, PHONE)
    shown.tab("Compare")
    above, below = (shown.find(f"//input[@aria-label='{label}']").rect for label in ("Model", "Beside it"))
    assert above["x"] == below["x"] and above["y"] + above["height"] < below["y"]


@pytest.mark.slow
def test_a_person_sees_every_family_in_a_browser_that_has_no_network(browser, folders):
    with serving([*folders.values()]) as address:
        shown = Page(browser, address)
        shown.tab(folders["seq2seq"])
        fill(shown, "Translation")
        model, tokenizer = make("seq2seq")
        *_, (translation, _) = translate(model, tokenizer, RIVER)
        assert shown.boxes("Translation") == [translation]
        (every,) = shown.pictures()
        shown.choose("Attention", "encoder")
        shown.choose("Layer", "0")
        shown.choose("Head", "1")
        (one,) = shown.wait(lambda: [size for size in shown.pictures() if size != every], "another picture")
        assert min(one) > 200
        shown.box("Sentence").send_keys("!")
        assert shown.boxes("Translation") == [""], "it was of another sentence"
        shown.tab("A word in two sentences")
        fill(shown, "A word in two sentences")
        assert min(shown.pictures()[0]) > 200

        for family in ("decoder", "encoder"):
            shown.tab(folders[family])
            for name in OWN[family]:
                shown.tab(name)
                fill(shown, name)
        assert shown.messages() == []

        shown.type("Word", "<img src=x onerror=document.title=1>")
        shown.press("Show")
        shown.find("//*[contains(@class, 'toast-body')]")
        (message,) = shown.messages()
        assert "word='<img src=x onerror=document.title=1>' is not in the sentence 'She sat" in message
        assert "Traceback" not in message and browser.title == "scratch-transformer"

    log = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [line["params"]["request"]["url"] for line in log if line["method"] == "Network.requestWillBeSent"]
    hosts = {urlsplit(url).hostname for url in asked if urlsplit(url).scheme not in ("data", "blob", "chrome")}
    assert len(asked) > 20 and hosts == {"127.0.0.1"}
    assert [line for line in browser.get_log("browser") if "ERR_CONNECTION" not in line["message"]] == []
