// The unmodified openai package of npm against a running platform.
// Arguments: base URL, key, a key limited to one request a minute, model. Prints one JSON object for test_sdk_node.py.
import OpenAI, { toFile } from "openai";

const [baseURL, apiKey, limitedKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60000 });
const messages = [{ role: "user", content: "hello big world" }];
const found = {};

async function failure(call) {
  try {
    await call();
    return { name: "none" };
  } catch (error) {
    return {
      name: error.constructor.name,
      status: error.status,
      code: error.code,
      param: error.param,
      type: error.type,
      requestId: error.requestID,
      retryAfter: error.headers?.get?.("retry-after"),
    };
  }
}

const plain = await client.chat.completions.create({ model, messages });
found.chat = { text: plain.choices[0].message.content, usage: plain.usage, requestId: plain._request_id };

async function streamed(extra) {
  const seen = { text: "", chunks: 0, finish: null, usage: null, empty: 0 };
  const stream = await client.chat.completions.create({ model, messages, stream: true, ...extra });
  for await (const chunk of stream) {
    seen.chunks += 1;
    if (chunk.choices.length === 0) seen.empty += 1;
    seen.text += chunk.choices[0]?.delta?.content ?? "";
    seen.finish = chunk.choices[0]?.finish_reason ?? seen.finish;
    seen.usage = chunk.usage ?? seen.usage;
  }
  return seen;
}
found.stream = await streamed({});
found.streamWithUsage = await streamed({ stream_options: { include_usage: true } });

const completion = await client.completions.create({ model, prompt: "once upon a time" });
found.completion = completion.choices[0].text;

const embeddings = await client.embeddings.create({ model, input: ["first", "second"] });
found.embeddings = embeddings.data.map((item) => item.embedding.length);

found.models = [];
for await (const item of client.models.list()) found.models.push(item.id);
found.retrieved = (await client.models.retrieve(model)).id;

// 40 MB are more than any body may have that is not streamed through.
const large = Buffer.alloc(40_000_000, "0123456789");
const sent = await client.files.create({
  file: await toFile(large, "größe.txt"),
  purpose: "user_data",
  expires_after: { anchor: "created_at", seconds: 3600 },
});
const listed = [];
for await (const file of client.files.list({ limit: 1 })) listed.push(file.id);
const back = Buffer.from(await (await client.files.content(sent.id)).arrayBuffer());
found.files = {
  sent,
  listed: listed.includes(sent.id),
  same: back.equals(large),
  deleted: (await client.files.delete(sent.id)).deleted,
  gone: await failure(() => client.files.retrieve(sent.id)),
};

found.wrongKey = await failure(() => new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list());
found.unknownModel = await failure(() => client.chat.completions.create({ model: "no/such", messages }));
found.badValue = await failure(() => client.chat.completions.create({ model, messages, temperature: 9 }));
const limited = new OpenAI({ baseURL, apiKey: limitedKey, maxRetries: 0 });
await limited.chat.completions.create({ model, messages });
found.overLimit = await failure(() => limited.chat.completions.create({ model, messages }));

const broken = [{ role: "user", content: "[[sim: tokens=9 error_after=3]] oh" }];
found.streamError = await failure(async () => {
  for await (const _ of await client.chat.completions.create({ model, messages: broken, stream: true }));
});

console.log(JSON.stringify(found));
