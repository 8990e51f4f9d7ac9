// Time llama.cpp on a GGUF file: node real_llama_cpp.mjs FILE, in a folder that has node-llama-cpp. Each line of the input
// is a call, [new tokens, tokens in the cache, repetitions]; each line of the output its CPU milliseconds. A line
// [[tokens of a chat], length of its prompt] is answered by the most likely token at each place of the answer.
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const installed = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(installed).href);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: process.argv[2]});
const context = await model.createContext({contextSize: 8192, batchSize: 512, threads: 1});
const sequence = context.getSequence();
const TOKEN = 28;

function processorTime() {
    const {user, system} = process.cpuUsage();
    return (user + system) / 1000;
}

// Until the most likely next token is known.
async function call(tokens) {
    const start = processorTime();
    for await (const token of sequence.evaluate(Array(tokens).fill(TOKEN), {temperature: 0}))
        return processorTime() - start;
}

console.log(JSON.stringify({release: llama.llamaCppRelease.release, processor: llama.systemInfo}));
for await (const line of createInterface({input: process.stdin})) {
    const [tokens, past, repetitions] = JSON.parse(line);
    if (Array.isArray(tokens)) {
        await sequence.clearHistory();
        const asked = {generateNext: {token: true, options: {temperature: 0}}};
        const found = await sequence.controlledEvaluate(tokens.map((token, i) => i >= past - 1 ? [token, asked] : token));
        console.log(JSON.stringify(found.slice(past - 1).map((each) => each.next.token)));
        continue;
    }
    const times = [];
    for (let i = 0; i < repetitions; i++) {
        if (i === 0 || tokens > 1) {
            await sequence.clearHistory();
            if (past) await sequence.evaluateWithoutGeneratingNewTokens(Array(past).fill(TOKEN));
        }
        times.push(await call(tokens));
    }
    console.log(JSON.stringify(times));
}
process.exit(0);
