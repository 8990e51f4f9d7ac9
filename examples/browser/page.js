// index.html?model=NAME opens the folder models/NAME, which `yobx-flatten export ... --layout transformers.js` wrote.
// A folder with `modules.json` (sentence-transformers) compares sentences; any other continues a conversation.
import { pipeline, env, TextStreamer } from "./node_modules/@huggingface/transformers/dist/transformers.js";

env.allowLocalModels = true; // in a browser it is off
env.allowRemoteModels = false; // nothing is fetched from elsewhere
env.localModelPath = "./models/";

// Without a GPU the smaller build computes on the CPU: the other has operators of quantised tables for a GPU only.
const adapter = navigator.gpu ? await navigator.gpu.requestAdapter() : null;
const build = adapter ? "ort-wasm-simd-threaded.asyncify" : "ort-wasm-simd-threaded";
const at = (end) => new URL(`./node_modules/onnxruntime-web/dist/${build}.${end}`, import.meta.url).href;
env.backends.onnx.wasm.wasmPaths = { mjs: at("mjs"), wasm: at("wasm") };

const name = new URLSearchParams(location.search).get("model") ?? "smollm2";
const byId = (id) => document.getElementById(id);
const say = (text) => { byId("status").textContent = text; };

const TASKS = {
  "text-generation": {
    about: "Ask something. The answer is computed on this machine.",
    text: "What is the capital of France?",
    async run(chat, text) {
      const answer = byId("answer");
      answer.textContent = "";
      const show = (piece) => { answer.textContent += piece; };
      const streamer = new TextStreamer(chat.tokenizer, { skip_prompt: true, skip_special_tokens: true, callback_function: show });
      const messages = [{ role: "user", content: text }];
      await chat(messages, { max_new_tokens: 64, do_sample: false, streamer });
    },
  },
  "feature-extraction": {
    about: "One sentence per line. The first is compared with each of the others: 1 is the same meaning.",
    text: "A cat sits on the mat.\nA kitten rests on a rug.\nThe stock market fell today.",
    async run(embed, text) {
      const lines = text.split("\n").filter((line) => line.trim());
      const found = await embed(lines, { pooling: "mean", normalize: true });
      const [first, ...others] = found.tolist();
      const shown = others.map((vector, row) => {
        const cosine = vector.reduce((sum, value, place) => sum + value * first[place], 0);
        return `${cosine.toFixed(4)}  ${lines[row + 1]}`;
      });
      byId("answer").textContent = shown.join("\n");
    },
  },
};

try {
  const compares = (await fetch(`./models/${name}/modules.json`)).ok;
  const kind = compares ? "feature-extraction" : "text-generation";
  const task = TASKS[kind];
  byId("title").textContent = name;
  byId("about").textContent = task.about;
  byId("text").value = task.text;
  const device = adapter ? "webgpu" : "wasm";
  const model = await pipeline(kind, name, { device });
  say(`ready (${device})`);
  byId("run").disabled = false;
  byId("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("run").disabled = true;
    say("computing ...");
    const start = performance.now();
    try {
      await task.run(model, byId("text").value);
      say(`done in ${((performance.now() - start) / 1000).toFixed(1)} s`);
    } catch (error) {
      say(`failed: ${error.message ?? error}`);
    }
    byId("run").disabled = false;
  });
} catch (error) {
  say(`The folder models/${name} was not opened: ${error.message ?? error}`);
}
