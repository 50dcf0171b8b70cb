// The AI SDK and the openai package of npm against a running platform.
// Arguments: URL without /v1, key, model. Prints the names of the checks that it went through.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const text = "hello big world";
const compatible = createOpenAICompatible({ name: "modelyard", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey });
const getWeather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "sunny",
});
const ways = {
  compatible: compatible.chatModel(model),
  openaiChat: openai.chat(model),
  openaiResponses: openai(model), // its default
};
const common = { maxRetries: 0, abortSignal: AbortSignal.timeout(30_000) };
const done = [];

async function check(name, body) {
  await body();
  done.push(name);
}

for (const [name, way] of Object.entries(ways)) {
  await check(`${name} generates text`, async () => {
    const answer = await generateText({ model: way, prompt: text, ...common });
    assert.equal(answer.text, text);
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.outputTokens, 3);
  });

  await check(`${name} streams text`, async () => {
    const errors = [];
    const answer = streamText({ model: way, prompt: text, onError: (event) => errors.push(event.error), ...common });
    let seen = "";
    for await (const piece of answer.textStream) seen += piece;
    assert.deepEqual(errors, []);
    assert.equal(seen, text);
    assert.equal(await answer.finishReason, "stop");
    assert.equal((await answer.usage).outputTokens, 3);
  });

  await check(`${name} goes round with a tool`, async () => {
    const tools = { get_weather: getWeather };
    const prompt = "please get_weather";
    const answer = await generateText({ model: way, prompt, tools, stopWhen: stepCountIs(2), ...common });
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.steps[0].finishReason, "tool-calls");
    assert.equal(answer.steps[0].toolCalls[0].toolName, "get_weather");
    assert.match(answer.text, /sunny/);
  });

  await check(`${name} streams a tool call`, async () => {
    const tools = { get_weather: tool({ ...getWeather, execute: undefined }) };
    const answer = streamText({ model: way, prompt: "please get_weather", tools, ...common });
    const kinds = [];
    for await (const part of answer.fullStream) kinds.push(part.type);
    assert(!kinds.includes("error"), kinds.join());
    assert(kinds.includes("tool-input-delta"), kinds.join());
    const [call] = await answer.toolCalls;
    assert.deepEqual(Object.keys(call.input), ["city"]);
  });

  await check(`${name} fills a schema`, async () => {
    const output = Output.object({ schema: z.object({ name: z.string(), age: z.number() }) });
    const answer = await generateText({ model: way, prompt: "somebody", output, ...common });
    assert.equal(answer.output.name, "somebody");
  });

  await check(`${name} tells that a stream broke`, async () => {
    const errors = [];
    const prompt = "[[sim: tokens=9 error_after=3]] oh";
    const answer = streamText({ model: way, prompt, onError: (event) => errors.push(event.error), ...common });
    for await (const _ of answer.fullStream);
    assert.equal(errors.length, 1);
  });
}

await check("embeds many", async () => {
  const values = ["first", "second"];
  for (const way of [compatible.embeddingModel(model), openai.embedding(model)]) {
    const answer = await embedMany({ model: way, values, ...common });
    assert.deepEqual(answer.embeddings.map((vector) => vector.length), [16, 16]);
  }
});

await check("openai of npm runs a tool and reads a stream of responses", async () => {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "please get_weather" }],
    stream: true,
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "Tell the weather.",
          parse: JSON.parse,
          parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
          function: async () => "sunny",
        },
      },
    ],
  });
  assert.match(await runner.finalContent(), /sunny/);
  const stream = client.responses.stream({ model, input: text });
  const final = await stream.finalResponse();
  assert.equal(final.output_text, text);
});

console.log(JSON.stringify(done));
