// What the tests know of the daemons, which sdk_npm_test.go starts.
import assert from "node:assert/strict";

export const url = process.env.KVASIR_URL;
export const narrow = process.env.KVASIR_NARROW_URL; // one answer runs, few wait
export const model = process.env.KVASIR_MODEL;
export const endBias = JSON.parse(process.env.KVASIR_END_BIAS); // keeps the model from ending

export const question = "What is 6 plus 7?";
export const answer = "6 plus 7 is 13.";

// sumSchema has one value only, so that an answer under it can be compared.
export const sum = { sum: 13, of: "6 plus 7" };
export const sumSchema = {
  type: "object",
  properties: { sum: { type: "integer", enum: [13] }, of: { const: "6 plus 7" } },
  required: ["sum", "of"],
  additionalProperties: false,
};

// failure awaits a failing call and returns its error, which must be of this class.
export async function failure(call, kind) {
  try {
    await call;
  } catch (e) {
    assert.ok(e instanceof kind, `${e.constructor.name}: ${e.message}, want ${kind.name}`);
    return e;
  }
  assert.fail(`no ${kind.name}`);
}

// fill takes all places of the narrow daemon with answers that do not end, and
// returns what gives them back.
export async function fill(openai) {
  const open = [];
  for (let full = false; !full;) {
    try {
      open.push(await openai.chat.completions.create({
        model, stream: true, max_tokens: 1 << 20, logit_bias: endBias, messages: [{ role: "user", content: question }],
      }));
    } catch (e) {
      assert.equal(e.status, 429);
      full = true;
    }
    assert.ok(open.length <= 64);
  }
  assert.ok(open.length >= 2);
  return () => open.forEach((stream) => stream.controller.abort());
}
