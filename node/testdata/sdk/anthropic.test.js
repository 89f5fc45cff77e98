// The client of Anthropic for JavaScript against a running daemon.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { answer, failure, fill, model, narrow, question, sum, sumSchema, url } from "./daemon.js";

const clientOf = (at, more) => new Anthropic({ baseURL: at, apiKey: "none is asked for", maxRetries: 0, ...more });
const messages = [{ role: "user", content: question }];
const tools = [{ name: "tell_sum", input_schema: sumSchema }];

const textOf = (m) => m.content.map((b) => b.text ?? "").join("");
const says = (text, reason, sequence = null) => (m) => assert.deepEqual([textOf(m), m.stop_reason, m.stop_sequence], [text, reason, sequence]);
const some = (m) => assert.ok(textOf(m));
const calls = (m) => assert.deepEqual([m.stop_reason, m.content.map((b) => [b.type, b.name, b.input])], ["tool_use", [["tool_use", "tell_sum", sum]]]);

// Options of messages, and what each must do, streamed or not.
const rows = [
  { name: "text", check: says(answer, "end_turn") },
  { name: "top_k", ask: { temperature: 2, top_k: 1 }, check: says(answer, "end_turn") },
  { name: "top_p", ask: { temperature: 2, top_p: 1e-9 }, check: says(answer, "end_turn") },
  { name: "max_tokens", ask: { max_tokens: 2 }, check: (m) => assert.deepEqual([m.stop_reason, m.usage.output_tokens], ["max_tokens", 2]) },
  { name: "stop_sequences", ask: { stop_sequences: ["never said", "7 is"] }, check: says("6 plus ", "stop_sequence", "7 is") },
  { name: "system", ask: { system: [{ type: "text", text: "Be brief.", cache_control: { type: "ephemeral" } }], max_tokens: 12 }, check: some },
  { name: "prefill", ask: { messages: [...messages, { role: "assistant", content: "6 plus 7" }] }, check: says(" is 13.", "end_turn") },
  { name: "thinking adaptive", ask: { thinking: { type: "adaptive" } }, check: says(answer, "end_turn") },
  { name: "thinking disabled", ask: { thinking: { type: "disabled" }, metadata: { user_id: "me" } }, check: says(answer, "end_turn") },
  { name: "tools", ask: { tools: [...tools, { type: "web_search_20250305", name: "web_search" }], max_tokens: 12 }, check: some },
  { name: "tool_choice none", ask: { tools, tool_choice: { type: "none" } }, check: says(answer, "end_turn") },
  {
    name: "results of tools", check: some,
    ask: {
      tools, max_tokens: 12,
      messages: [
        ...messages,
        { role: "assistant", content: [{ type: "tool_use", id: "toolu_1", name: "tell_sum", input: sum }] },
        { role: "user", content: [{ type: "tool_result", tool_use_id: "toolu_1", content: "13" }] },
      ],
    },
  },
  { name: "tool_choice any", ask: { tools, tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 128 }, check: calls },
  {
    name: "tool_choice tool", check: calls,
    ask: { tools, tool_choice: { type: "tool", name: "tell_sum", disable_parallel_tool_use: true }, max_tokens: 128 },
  },
  {
    name: "form", ask: { output_config: { format: { type: "json_schema", schema: sumSchema } } },
    check: (m) => assert.deepEqual(JSON.parse(textOf(m)), sum),
  },
];

for (const [i, row] of rows.entries()) {
  const client = clientOf([url, `${url}/anthropic`][i % 2]);
  test(`messages: ${row.name}`, async () => {
    const request = { model, messages, temperature: 0, max_tokens: 64, ...row.ask };
    await client.messages.create(request); // then its prompt may be in a cache for both
    const whole = await client.messages.create(request);
    const streamed = await client.messages.stream(request).finalMessage();
    for (const m of [whole, streamed]) {
      row.check(m);
      assert.deepEqual([m.type, m.role, m.model], ["message", "assistant", model]);
    }
    assert.deepEqual([textOf(streamed), streamed.stop_reason, streamed.usage.output_tokens], [textOf(whole), whole.stop_reason, whole.usage.output_tokens]);
    const { temperature, max_tokens, stop_sequences, top_k, top_p, metadata, ...counted } = request;
    const count = await client.messages.countTokens(counted);
    assert.equal(count.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
  });
}

test("models", async () => {
  for (const at of [url, `${url}/anthropic`]) {
    const ids = [];
    for await (const m of clientOf(at).models.list()) ids.push(m.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await clientOf(at).models.retrieve(model)).type, "model");
  }
});

test("errors", async () => {
  const ask = (more) => clientOf(url).messages.create({ model, messages, max_tokens: 4, ...more });
  for (const [call, kind, status, type] of [
    [() => ask({ temperature: 3 }), Anthropic.BadRequestError, 400, "invalid_request_error"],
    [() => ask({ temperature: 3, stream: true }), Anthropic.BadRequestError, 400, "invalid_request_error"],
    [() => ask({ messages: [{ role: "user", content: `${question} `.repeat(20_000) }] }), Anthropic.BadRequestError, 400, "invalid_request_error"],
    [() => ask({ messages: [{ role: "user", content: "x".repeat(33 << 20) }] }), Anthropic.APIError, 413, "request_too_large"],
    [() => ask({ model: "claude-none" }), Anthropic.NotFoundError, 404, "not_found_error"],
  ]) {
    const e = await failure(call(), kind);
    assert.deepEqual([e.status, e.error.error.type], [status, type]);
    assert.ok(e.requestID);
  }
});

test("overload", async () => {
  const free = await fill(new OpenAI({ baseURL: `${narrow}/v1`, apiKey: "none is asked for", maxRetries: 0 }));
  const request = { model, messages, temperature: 0, max_tokens: 64 };
  const e = await failure(clientOf(narrow).messages.create(request), Anthropic.InternalServerError);
  assert.deepEqual([e.status, e.error.error.type], [529, "overloaded_error"]);
  const tries = [];
  const patient = clientOf(narrow, {
    maxRetries: 2,
    fetch: async (...request) => {
      const response = await fetch(...request);
      tries.push(response.status);
      free();
      return response;
    },
  });
  says(answer, "end_turn")(await patient.messages.create(request));
  assert.deepEqual(tries, [529, 200]);
});
