// The client of OpenAI for JavaScript against a running daemon.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { answer, endBias, failure, fill, model, narrow, question, sum, sumSchema, url } from "./daemon.js";

const clientOf = (at, more) => new OpenAI({ baseURL: `${at}/v1`, apiKey: "none is asked for", maxRetries: 0, ...more });
const client = clientOf(url);
const messages = [{ role: "user", content: question }];
const tool = { type: "function", function: { name: "tell_sum", strict: true, parameters: sumSchema } };
const endless = { logit_bias: endBias, max_completion_tokens: 32 };

const says = (text, finish) => (c) => {
  for (const [i, choice] of c.choices.entries()) {
    assert.deepEqual([choice.index, choice.message.content, choice.finish_reason], [i, text, finish]);
  }
};
const cut = (c) => assert.equal(c.choices[0].finish_reason, "length");
const calls = (c) => {
  const [call, ...more] = c.choices[0].message.tool_calls;
  assert.deepEqual([more.length, c.choices[0].finish_reason, call.function.name], [0, "tool_calls", "tell_sum"]);
  assert.deepEqual(JSON.parse(call.function.arguments), sum);
};
const noCall = (c) => assert.deepEqual(c.choices[0].message.tool_calls ?? [], []);

// Options of chat completions, and what each must do, streamed or not.
const chats = [
  { name: "greedy", check: says(answer, "stop") },
  { name: "top_p", ask: { temperature: 2, top_p: 1e-9 }, check: says(answer, "stop") },
  { name: "top_k", ask: { temperature: 2, top_k: 1 }, check: says(answer, "stop") },
  { name: "min_p", ask: { temperature: 2, min_p: 1 }, check: says(answer, "stop") },
  { name: "seed", ask: { ...endless, temperature: 2, seed: 7 }, check: cut },
  { name: "penalties", ask: { ...endless, frequency_penalty: 1, presence_penalty: 1, repetition_penalty: 1.5 }, check: cut },
  { name: "max_tokens", ask: { max_completion_tokens: undefined, max_tokens: 2 }, check: cut },
  { name: "stop", ask: { stop: "7 is" }, check: says("6 plus ", "stop") },
  { name: "stops", ask: { stop: ["never said", " 13"] }, check: says("6 plus 7 is", "stop") },
  { name: "n", ask: { n: 2 }, check: (c) => { assert.equal(c.choices.length, 2); says(answer, "stop")(c); } },
  { name: "prefill", ask: { messages: [...messages, { role: "assistant", content: "6 plus 7" }] }, check: says(" is 13.", "stop") },
  { name: "ignored", ask: { user: "me", store: true, metadata: { a: "b" }, service_tier: "auto", prompt_cache_key: "k" }, check: says(answer, "stop") },
  { name: "tools", ask: { tools: [tool], parallel_tool_calls: true, max_completion_tokens: 12 }, check: noCall },
  { name: "tool_choice none", ask: { tools: [tool], tool_choice: "none" }, check: says(answer, "stop") },
  {
    name: "results of tools", check: noCall,
    ask: {
      tools: [tool], max_completion_tokens: 12,
      messages: [
        ...messages,
        { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: { name: "tell_sum", arguments: JSON.stringify(sum) } }] },
        { role: "tool", tool_call_id: "call_1", content: "13" },
      ],
    },
  },
  { name: "tool_choice required", ask: { tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_completion_tokens: 128 }, check: calls },
  {
    name: "tool_choice named", check: calls,
    ask: { tools: [tool], tool_choice: { type: "function", function: { name: "tell_sum" } }, parallel_tool_calls: false, max_completion_tokens: 128 },
  },
  {
    name: "json_schema",
    ask: { response_format: { type: "json_schema", json_schema: { name: "sum", strict: true, schema: sumSchema } } },
    check: (c) => assert.deepEqual(JSON.parse(c.choices[0].message.content), sum),
  },
  {
    name: "json_object", ask: { response_format: { type: "json_object" }, max_completion_tokens: 48 },
    check: (c) => {
      const { message, finish_reason } = c.choices[0];
      assert.match(message.content, /^\s*\{/);
      if (finish_reason === "stop") JSON.parse(message.content);
    },
  },
  {
    name: "logprobs", ask: { logprobs: true, top_logprobs: 2 },
    check: (c) => {
      const tokens = c.choices[0].logprobs.content;
      assert.equal(Buffer.from(tokens.flatMap((t) => t.bytes)).toString(), answer);
      tokens.forEach((t) => assert.equal(t.top_logprobs.length, 2));
    },
  },
];

for (const { name, ask, check } of chats) {
  test(`chat: ${name}`, async () => {
    const request = { model, messages, temperature: 0, max_completion_tokens: 64, ...ask };
    await client.chat.completions.create(request); // then its prompt may be in a cache for both
    const whole = await client.chat.completions.create(request);
    // create, not the helper stream: that one stops at answers that are cut off
    const streamed = await joined(await client.chat.completions.create({ ...request, stream: true, stream_options: { include_usage: true } }));
    for (const c of [whole, streamed]) {
      check(c);
      assert.ok(c.usage.prompt_tokens > 0 && c.usage.completion_tokens > 0);
    }
    const shape = (c) => c.choices.map((k) => [k.index, k.message.content ?? "", k.finish_reason, (k.message.tool_calls ?? []).map((t) => t.function)]);
    assert.deepEqual(shape(streamed), shape(whole));
    assert.equal(streamed.usage.completion_tokens, whole.usage.completion_tokens);
  });
}

// joined puts chunks together as programs do.
async function joined(stream) {
  const choices = [];
  let usage, id;
  for await (const chunk of stream) {
    id ??= chunk.id;
    assert.equal(chunk.id, id);
    usage = chunk.usage;
    for (const { index, delta, finish_reason, logprobs } of chunk.choices) {
      const c = (choices[index] ??= { index, message: { content: "", tool_calls: [] }, logprobs: { content: [] } });
      c.message.content += delta.content ?? "";
      for (const { index: at, id, function: f } of delta.tool_calls ?? []) {
        if (id) c.message.tool_calls[at] = { id, function: { name: f.name, arguments: "" } };
        c.message.tool_calls[at].function.arguments += f.arguments;
      }
      c.logprobs.content.push(...(logprobs?.content ?? []));
      c.finish_reason = finish_reason;
    }
  }
  return { choices, usage };
}

test("chat: the helper that joins a stream", async () => {
  const c = await client.chat.completions.stream({ model, messages, temperature: 0 }).finalChatCompletion();
  says(answer, "stop")(c);
});

test("completions", async () => {
  const request = { model, prompt: ["The capital of France is", "The capital of Japan is"], temperature: 0, stop: "\n" };
  const whole = await client.completions.create(request);
  assert.deepEqual(whole.choices.map((c) => c.text), [" Paris.", " Tokyo."]);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...request, stream: true })) {
    chunk.choices.forEach((c) => (texts[c.index] += c.text));
  }
  assert.deepEqual(texts, [" Paris.", " Tokyo."]);
});

const responses = [
  { name: "text", check: (r) => assert.equal(r.output_text, answer) },
  { name: "items", ask: { input: [{ role: "developer", content: "Be kind." }, ...messages], max_output_tokens: 12 }, check: (r) => assert.ok(r.output_text) },
  { name: "max_output_tokens", ask: { max_output_tokens: 2 }, check: (r) => assert.deepEqual([r.status, r.incomplete_details.reason], ["incomplete", "max_output_tokens"]) },
  { name: "tool_choice none", ask: { tools: [{ type: "function", name: "tell_sum", parameters: sumSchema }], tool_choice: "none" }, check: (r) => assert.equal(r.output_text, answer) },
  {
    name: "tool_choice required",
    ask: { tools: [{ type: "function", name: "tell_sum", parameters: sumSchema }], tool_choice: "required", parallel_tool_calls: false, max_output_tokens: 128 },
    check: (r) => {
      assert.deepEqual(r.output.map((o) => [o.type, o.name]), [["function_call", "tell_sum"]]);
      assert.deepEqual(JSON.parse(r.output[0].arguments), sum);
    },
  },
  {
    name: "json_schema", ask: { text: { format: { type: "json_schema", name: "sum", strict: true, schema: sumSchema } } },
    check: (r) => assert.deepEqual(JSON.parse(r.output_text), sum),
  },
];

for (const { name, ask, check } of responses) {
  test(`responses: ${name}`, async () => {
    const request = { model, input: question, temperature: 0, max_output_tokens: 64, ...ask };
    await client.responses.create(request);
    const whole = await client.responses.create(request);
    let last, deltas = "", n = 0;
    for await (const event of await client.responses.create({ ...request, stream: true })) {
      assert.equal(event.sequence_number, n++);
      if (event.type === "response.output_text.delta") deltas += event.delta;
      last = event;
    }
    assert.equal(last.type, `response.${whole.status}`);
    for (const r of [whole, last.response]) {
      check({ ...r, output_text: textOf(r) });
      assert.ok(r.usage.input_tokens > 0 && r.usage.output_tokens > 0);
    }
    assert.deepEqual([deltas, textOf(last.response)], [whole.output_text, whole.output_text]);
  });
}

const textOf = (r) => r.output.flatMap((o) => o.content ?? []).map((c) => c.text).join("");

test("responses: the helper that joins a stream", async () => {
  const r = await client.responses.stream({ model, input: question, temperature: 0 }).finalResponse();
  assert.equal(r.output_text, answer);
});

test("responses: stored", async () => {
  const first = await client.responses.create({ model, input: question, temperature: 0 });
  const second = await client.responses.create({ model, input: "Hi", temperature: 0, previous_response_id: first.id, max_output_tokens: 4 });
  assert.ok(second.usage.input_tokens > first.usage.total_tokens);
  assert.equal((await client.responses.retrieve(first.id)).output_text, answer);
  await client.responses.delete(first.id);
  await failure(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("models", async () => {
  const ids = [];
  for await (const m of client.models.list()) ids.push(m.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
  const e = await failure(client.models.retrieve("gpt-9"), OpenAI.NotFoundError);
  assert.equal(e.code, "model_not_found");
  assert.match(e.message, new RegExp(model));
});

test("errors", async () => {
  const chat = (more) => client.chat.completions.create({ model, messages, ...more });
  for (const [call, kind, status, param, code] of [
    [() => chat({ temperature: 3 }), OpenAI.BadRequestError, 400, "temperature", "invalid_value"],
    [() => chat({ temperature: 3, stream: true }), OpenAI.BadRequestError, 400, "temperature", "invalid_value"],
    [() => chat({ messages: [] }), OpenAI.BadRequestError, 400, "messages", "invalid_value"],
    [() => chat({ messages: [{ role: "user", content: `${question} `.repeat(20_000) }] }), OpenAI.BadRequestError, 400, "messages", "context_length_exceeded"],
    [() => chat({ messages: [{ role: "user", content: "x".repeat(33 << 20) }] }), OpenAI.APIError, 413, null, "body_too_large"],
    [() => chat({ model: "gpt-9" }), OpenAI.NotFoundError, 404, "model", "model_not_found"],
    [() => client.embeddings.create({ model, input: "a" }), OpenAI.BadRequestError, 400, "model", "unsupported_value"],
    [() => client.files.list(), OpenAI.NotFoundError, 404, null, "unknown_url"],
  ]) {
    const e = await failure(call(), kind);
    assert.deepEqual([e.status, e.param, e.code], [status, param, code]);
    assert.ok(e.requestID);
  }
});

test("overload", async () => {
  const free = await fill(clientOf(narrow));
  const e = await failure(clientOf(narrow).chat.completions.create({ model, messages }), OpenAI.RateLimitError);
  assert.equal(e.code, "queue_full");
  assert.ok(Number(e.headers.get("retry-after")) >= 1);
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
  says(answer, "stop")(await patient.chat.completions.create({ model, messages, temperature: 0 }));
  assert.deepEqual(tries, [429, 200]);
});
