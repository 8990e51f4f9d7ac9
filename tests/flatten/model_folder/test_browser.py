"""The page of `examples/browser` opens exported folders in Chromium; PyTorch is the source of all answers."""

import functools
import http.server
import json
import os
import pathlib
import shutil
import threading

import pytest
import transformers

pytest.importorskip("selenium", reason="`make browser` installs it")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.flatten.model_folder.exported_folders import WORDS, bert_folder, made, mean_embeddings, word_tokenizer
from tests.flatten.model_folder.test_sentence import MEAN, write_modules
from tests.models import SIZES
from yobx_flatten import Quantization, export_folder

PAGE = pathlib.Path(__file__).parents[3] / "examples" / "browser"
SECONDS = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PAGE / "node_modules").is_dir(), reason="`make browser` installs transformers.js"),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    for name in ("index.html", "page.js", "node_modules"):
        (root / name).symlink_to(PAGE / name)
    (root / "models").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *given):
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root / "models", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# A browser without a GPU has WebGPU through an adapter that computes on the CPU.
_DEVICES = {
    "wasm": ("--disable-gpu",),
    "webgpu": ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader"),
}


# Given to `execute_async_script`: the last argument is what to call with the answer.
_KNOWS_HALF = (
    "const done = arguments[0];navigator.gpu.requestAdapter().then((found) => done(found.features.has('shader-f16')))"
)


@pytest.fixture(scope="module", params=_DEVICES)
def browser(request, site, tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    folder = tmp_path_factory.mktemp("profile")
    for option in ("headless", "no-sandbox", "disable-background-networking", "disable-dev-shm-usage"):
        options.add_argument(f"--{option}")
    for option in (f"--user-data-dir={folder}", *_DEVICES[request.param]):
        options.add_argument(option)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(SECONDS)
    driver.get(f"{site[1]}/index.html?model=absent")  # a page of this machine: others have no WebGPU
    has_adapter = driver.execute_async_script(
        "const done = arguments[0];"
        "(navigator.gpu ? navigator.gpu.requestAdapter() : Promise.resolve(null)).then((found) => done(found !== null))"
    )
    driver.computes_on = request.param
    if has_adapter is (request.param == "webgpu"):
        yield driver
    driver.quit()
    if has_adapter is not (request.param == "webgpu"):
        pytest.skip("this Chromium has no adapter of WebGPU" if request.param == "webgpu" else "it always has one")


def status(browser, *words: str) -> str:
    """The text of the status, when it begins with one of the words."""
    WebDriverWait(browser, SECONDS).until(lambda driver: driver.find_element(By.ID, "status").text.startswith(words))
    return browser.find_element(By.ID, "status").text


def answer(browser, address: str, model: str, text: str) -> str:
    browser.get(f"{address}/index.html?model={model}")
    assert status(browser, "ready", "failed", "The folder") == f"ready ({browser.computes_on})"
    browser.execute_script("document.getElementById('text').value = arguments[0]", text)
    browser.find_element(By.ID, "run").click()
    assert status(browser, "done", "failed", "The folder").startswith("done in")
    return browser.find_element(By.ID, "answer").text


@pytest.fixture(scope="module")
def llama(site):
    folder, _ = site
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), initializer_range=0.5, pad_token_id=0, bos_token_id=2, eos_token_id=3, **SIZES
    )
    model, tokenizer = made(transformers.LlamaForCausalLM, config), word_tokenizer()
    for saved in (model, tokenizer):
        saved.save_pretrained(folder.parent / "saved")
    export_folder(folder.parent / "saved", folder / "llama", layout="transformers.js")
    return model, tokenizer


@pytest.fixture(scope="module")
def encoder(site):
    folder, _ = site
    saved = folder.parent / "encoder"
    model = bert_folder(saved, initializer_range=0.1)
    write_modules(saved, ["Pooling"], Pooling=MEAN)
    export_folder(saved, folder / "encoder", layout="transformers.js")
    by_token = Quantization("int8", activations="token")
    export_folder(saved, folder / "encoder-int8", layout="transformers.js", quantize=by_token)
    return model


def test_a_chat_continues_as_the_model_does(site, browser, llama):
    model, tokenizer = llama
    text = "word3 word17 word40"
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    given.pop("token_type_ids", None)
    made = model.generate(**given, max_new_tokens=64, do_sample=False)[0, given["input_ids"].shape[1] :]
    expected = tokenizer.decode(made, skip_special_tokens=True)
    assert answer(browser, site[1], "llama", text).split() == expected.split()


@pytest.mark.parametrize(("name", "close"), [("encoder", 2e-4), ("encoder-int8", 0.05)])
def test_embeddings_are_as_close_as_the_model_s(site, browser, encoder, name, close):
    """Mean over the tokens of each sentence, of other lengths; int8 has one scale for each token."""
    lines = ["word1 word2 word3", "word4", "word1 word2 word3 word50 word51"]
    means = mean_embeddings(encoder, word_tokenizer()(lines, padding=True, return_tensors="pt"))
    shown = [line.split()[0] for line in answer(browser, site[1], name, "\n".join(lines)).splitlines()]
    assert [float(value) for value in shown] == pytest.approx((means[1:] @ means[0]).tolist(), abs=close)


def test_a_folder_that_is_not_there_is_named(site, browser):
    browser.get(f"{site[1]}/index.html?model=absent")
    assert "models/absent was not opened" in status(browser, "ready", "failed", "The folder")


@pytest.mark.skipif(not os.environ.get("BROWSER_MODEL"), reason="BROWSER_MODEL names no exported SmolLM2")
def test_a_model_with_trained_weights_answers(site, browser):
    """BROWSER_MODEL is the path of a folder that was exported with this layout."""
    folder, address = site
    half = (
        json.loads((pathlib.Path(os.environ["BROWSER_MODEL"]) / "yobx_flatten.json").read_text())["dtype"] == "float16"
    )
    if half and browser.computes_on == "webgpu" and not browser.execute_async_script(_KNOWS_HALF):
        pytest.skip("this adapter of WebGPU has no float16")
    if not (folder / "smollm2").exists():
        (folder / "smollm2").symlink_to(os.path.abspath(os.environ["BROWSER_MODEL"]))
    assert "Paris" in answer(browser, address, "smollm2", "What is the capital of France?")
