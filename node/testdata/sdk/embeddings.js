// The client of OpenAI for JavaScript against a daemon of a model of embeddings. It is no
// *.test.js, since those run against another daemon.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const { KVASIR_URL: url, KVASIR_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none is asked for", maxRetries: 0 });
const texts = ["the capital of france is paris.", "a", "what is 6 plus 7?"];

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
// near: both have the length 1 and the same direction, but for rounding.
const near = (a, b) => {
  assert.equal(a.length, b.length);
  assert.ok(a.length > 0 && Math.abs(dot(a, a) - 1) < 1e-4 && Math.abs(dot(a, b) - 1) < 1e-4, `${dot(a, a)} ${dot(a, b)}`);
};

test("formats", async () => {
  // The client asks for base64 by itself and gives numbers.
  const plain = await client.embeddings.create({ model, input: texts[0] });
  const floats = await client.embeddings.create({ model, input: texts[0], encoding_format: "float" });
  const packed = await client.embeddings.create({ model, input: texts[0], encoding_format: "base64" });
  near(plain.data[0].embedding, floats.data[0].embedding);
  assert.equal(typeof packed.data[0].embedding, "string");
  const bytes = Buffer.from(packed.data[0].embedding, "base64");
  assert.equal(bytes.length, 4 * plain.data[0].embedding.length);
  assert.deepEqual(plain.data[0].embedding.map((_, i) => bytes.readFloatLE(4 * i)), Array.from(plain.data[0].embedding));
});

test("batch", async () => {
  const all = await client.embeddings.create({ model, input: texts });
  assert.deepEqual([all.object, all.model, all.data.map((d) => [d.object, d.index])],
    ["list", model, [["embedding", 0], ["embedding", 1], ["embedding", 2]]]);
  let used = 0;
  for (const [i, input] of texts.entries()) {
    const one = await client.embeddings.create({ model, input });
    near(all.data[i].embedding, one.data[0].embedding);
    used += one.usage.prompt_tokens;
  }
  assert.deepEqual(all.usage, { prompt_tokens: used, total_tokens: used });
  assert.ok(dot(all.data[0].embedding, all.data[1].embedding) < 0.999);
});

test("refused", async () => {
  for (const [more, param, code] of [
    [{ dimensions: 8 }, "dimensions", "invalid_value"],
    [{ encoding_format: "int8" }, "encoding_format", "invalid_value"],
    [{ input: [] }, "input", "invalid_value"],
    [{ input: ["a", ""] }, "input[1]", "invalid_value"],
    [{ input: "word ".repeat(600) }, "input", "context_length_exceeded"],
  ]) {
    const e = await client.embeddings.create({ model, input: "a", ...more }).then(() => assert.fail("not refused"), (e) => e);
    assert.ok(e instanceof OpenAI.BadRequestError, e.message);
    assert.deepEqual([e.param, e.code], [param, code]);
  }
});

test("no text", async () => {
  const e = await client.chat.completions.create({ model, messages: [{ role: "user", content: "hi" }] }).then(() => assert.fail("not refused"), (e) => e);
  assert.ok(e instanceof OpenAI.BadRequestError, e.message);
  assert.deepEqual([e.param, e.code], ["model", "unsupported_value"]);
});
